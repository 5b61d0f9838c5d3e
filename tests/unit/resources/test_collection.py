"""Garbage is searched for as before when a block is over, however it ends."""

from __future__ import annotations

import gc

import pytest

from resources.collection import seldom_collecting


def test_searches_are_as_frequent_as_before_after_blocks_in_blocks():
    before = gc.get_threshold()

    @seldom_collecting()
    def inner() -> int:
        return gc.get_threshold()[0]

    assert inner() > before[0]
    assert gc.get_threshold() == before
    with pytest.raises(KeyError), seldom_collecting():
        assert inner() == gc.get_threshold()[0] > before[0]
        raise KeyError
    assert gc.get_threshold() == before
