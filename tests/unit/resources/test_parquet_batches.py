"""Small Parquet files that expand to gigabytes: read completely, in batches of bounded size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from resources.storage.parquet_batches import bounded_batches
from tasks.generation.prompts import PromptSource, table_batches


def _bomb(file: Path, *, value_bytes: int, rows: int, **options: Any) -> Path:
    once = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * value_bytes]))
    parquet.write_table(pa.table({"text": once}), file, compression="zstd", store_schema=False, **options)
    return file


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"}])
def test_batches_of_a_repeated_large_value_are_small(tmp_path: Path, options: dict[str, Any]) -> None:
    file = _bomb(tmp_path / "a.parquet", value_bytes=10**7, rows=100, **options)
    assert file.stat().st_size < 10**5
    sizes = [batch.num_rows for batch in table_batches(PromptSource(str(file), "parquet"))]
    assert sum(sizes) == 100 and max(sizes) <= 2**28 // 10**7


def test_dictionary_over_the_bound_is_refused(tmp_path: Path) -> None:
    file = _bomb(tmp_path / "a.parquet", value_bytes=2**28 + 1, rows=3)
    with file.open("rb") as opened, pytest.raises(pa.ArrowInvalid, match="column text repeats values"):
        list(bounded_batches(parquet.ParquetFile(opened), opened, rows=9, group=0))


def test_batches_of_small_values_have_all_rows_asked_for(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": [str(n % 7) for n in range(1000)]}), tmp_path / "a.parquet")
    assert [batch.num_rows for batch in table_batches(PromptSource(str(tmp_path / "a.parquet"), "parquet"))] == [1000]
