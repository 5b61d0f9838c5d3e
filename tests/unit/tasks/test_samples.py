"""Samples are written whole, whatever a model says."""

from __future__ import annotations

from pathlib import Path

from tasks.records.samples import Sample, read_samples, write_samples


def test_sample_with_half_a_character_is_written_without_it(tmp_path: Path) -> None:
    """JSON can carry one from an endpoint, which would otherwise cost the record of the cell."""
    sample = Sample(benchmark="b", id="1", prompt="?", output="so \ud83d", target=None, scores={"acc": 0.0})
    assert write_samples(tmp_path / "samples.jsonl.gz", [sample]) == 1
    [read] = read_samples(str(tmp_path / "samples.jsonl.gz"))
    assert (read.output, read.target) == ("so ?", None)
