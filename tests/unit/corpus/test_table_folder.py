"""Parts of a table are streamed and written atomically, to a disk and to an object store."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from memagent_corpus import CorpusRow, TableFolder
from memagent_corpus.corpus_ledger import CorpusLedger
from memagent_corpus.corpus_rows import list_column_values
from memagent_graph.errors import CorpusError

ROW_COUNT = 5000
FIRST_PART = "part-000000.parquet"


def make_rows(count: int = ROW_COUNT) -> Iterator[dict[str, Any]]:
    """Yield rows whose answers hardly compress."""
    for number in range(count):
        row = CorpusRow(id=f"{number}", document="a.txt", digest=None, question="?", answer=os.urandom(256).hex())
        yield list_column_values(row)


@pytest.fixture(params=["disk", "store"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> TableFolder:
    table = TableFolder(str(tmp_path) if request.param == "disk" else f"memory://{tmp_path.name}/table")
    table.take_over({}, "rows")
    return table


def test_manifest_has_the_size_and_digest_of_each_written_part(table: TableFolder) -> None:
    part = table.write_part(0, make_rows(), ())
    assert part is not None
    table.publish([part])
    with fsspec.open(f"{table.location}/{FIRST_PART}") as file:
        content, manifest = file.read(), table.manifest()
    assert manifest is not None and manifest.parts == (part,)
    assert (part.rows, part.failed) == (ROW_COUNT, 0)
    assert (part.bytes, part.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert [row["id"] for row in table.rows(["id"])] == [str(number) for number in range(ROW_COUNT)]
    assert table.find_damaged_parts([part]) == []
    with pytest.raises(CorpusError, match="Call `take_over` first"):
        TableFolder(table.location).remove_unlisted_files()
    table.publish([])
    table.remove_unlisted_files()
    assert table.find_damaged_parts([part]) == [part]


def test_part_of_another_program_is_refused_even_with_a_matching_digest(table: TableFolder, tmp_path: Path) -> None:
    """A foreign manifest may list such a part with its right digest."""
    own_part = table.write_part(0, make_rows(3), ())
    assert own_part is not None
    contents = {"not one that": b"PAR1 and no more"}
    for reason, names in {"no column answer": ["id"], "not a text": CorpusRow.__struct_fields__}.items():
        parquet.write_table(pyarrow.table({name: [None] for name in names}), parquet_file := io.BytesIO())
        contents[reason] = parquet_file.getvalue()
    for reason, content in contents.items():
        with fsspec.open(f"{table.location}/{FIRST_PART}", "wb") as part_file:
            part_file.write(content)
        part = replace(own_part, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        table.publish([part])
        with pytest.raises(CorpusError, match=f"the part {FIRST_PART} of .*{reason}"):
            list(table.rows(["id", "error"]))
    ledger = CorpusLedger(tmp_path / "ledger.sqlite")
    ledger.store_rows("b", "", [CorpusRow(id=cast("str", 7), document="b", digest=None, question="?")])
    with pytest.raises(CorpusError, match="damaged or foreign"):
        list(ledger.iter_waiting_rows(1))


def test_a_part_that_fails_during_writing_leaves_no_file(table: TableFolder) -> None:
    def fail_after_all_rows() -> Iterator[dict[str, Any]]:
        yield from make_rows()
        raise ValueError("no more rows")

    with pytest.raises(ValueError, match="no more rows"):
        table.write_part(0, fail_after_all_rows(), ())
    assert table.write_part(0, (), ()) is None
    if "://" not in table.location:
        assert [path.name for path in Path(table.location).iterdir()] == ["_manifest.json"]


def test_rows_are_written_to_disk_while_they_are_produced(tmp_path: Path) -> None:
    table, unfinished_sizes = TableFolder(str(tmp_path)), []
    table.take_over({}, "rows")

    def record_sizes() -> Iterator[dict[str, Any]]:
        for row in make_rows():
            unfinished_sizes.append(sum(path.stat().st_size for path in tmp_path.glob(".writing-*")))
            yield row

    table.write_part(0, record_sizes(), ())
    assert unfinished_sizes[-1] > (tmp_path / FIRST_PART).stat().st_size / 2
