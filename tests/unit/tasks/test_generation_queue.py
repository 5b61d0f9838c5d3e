"""The queue of shards: a restarted worker returns its shards, and written shards count once."""

from __future__ import annotations

from tasks.generation.queue import PromptSource, Shard, ShardProgress, ShardQueue

SHARDS = [Shard(number, PromptSource("a.jsonl", "jsonl"), number * 2, 2, number * 2) for number in range(3)]


def test_restarted_worker_gives_back_its_shards_and_late_words_are_ignored() -> None:
    queue = ShardQueue(SHARDS, max_deliveries=10)
    queue.begin("a")
    lost = queue.lend("a")
    assert lost is not None and lost.item == SHARDS[0]
    queue.advance("a", {lost.lease_id: ShardProgress(1, 10, 0)})
    assert (queue.state().progress.rows, queue.state().leased) == (1, 1)
    queue.begin("a")
    assert (queue.state().progress.rows, queue.state().leased, queue.state().waiting) == (0, 0, 3)
    assert queue.advance("a", {lost.lease_id: ShardProgress(2, 20, 0)}) == [lost.lease_id]
    assert queue.state().progress.rows == 0


def test_written_shards_are_counted_once_for_any_finisher() -> None:
    queue = ShardQueue(SHARDS[:1], max_deliveries=10)
    first = queue.lend("a")
    assert first is not None
    queue.begin("a")
    second = queue.lend("b")
    assert second is not None and second.item == SHARDS[0]
    queue.finish("a", first, ShardProgress(2, 20, 1, "400: no"))
    assert queue.state().progress.rows == 0
    queue.finish("b", second, ShardProgress(2, 20, 1, "400: no"))
    state = queue.state()
    assert (state.progress, state.done) == (ShardProgress(2, 20, 1, "400: no"), 1)
    assert state.left == 0 and queue.lend("b") is None


def test_unfinishable_shard_is_set_aside_with_the_last_reason() -> None:
    queue = ShardQueue(SHARDS[:1], max_deliveries=2)
    for _ in range(2):
        lease = queue.lend("a")
        assert lease is not None
        queue.give_back("a", lease, "the store is gone")
    assert queue.state().dead == ("shard 0: the store is gone",) and queue.state().left == 0


def test_shard_with_deleted_prompts_is_not_tried_again() -> None:
    queue = ShardQueue(SHARDS[:1], max_deliveries=10)
    lease = queue.lend("a")
    assert lease is not None
    queue.give_back("a", lease, "0 rows from row 0 on", hopeless=True)
    assert queue.state().dead == ("shard 0: 0 rows from row 0 on",) and queue.lend("a") is None
