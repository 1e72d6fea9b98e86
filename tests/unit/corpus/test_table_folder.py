"""How a part of a table is written: as its rows come, whole or not at all, on a disk and in a store."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from memagent_corpus import CorpusRow, TableFolder
from memagent_corpus.corpus_rows import list_column_values
from memagent_graph.errors import CorpusError

ROWS = 5000
FIRST = "part-000000.parquet"


def rows(count: int = ROWS) -> Iterator[dict[str, Any]]:
    """Rows whose answers cannot be compressed well."""
    for number in range(count):
        row = CorpusRow(
            id=f"{number}", document=f"{number}.txt", digest=None, question="?", answer=os.urandom(256).hex()
        )
        yield list_column_values(row)


def content_of(location: str) -> bytes:
    with fsspec.open(f"{location}/{FIRST}") as file:
        return bytes(file.read())


@pytest.fixture(params=["disk", "store"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> TableFolder:
    table = TableFolder(str(tmp_path) if request.param == "disk" else f"memory://{tmp_path.name}/table")
    table.take_over({}, "rows")
    return table


def test_the_manifest_has_the_size_and_digest_of_what_was_written(table: TableFolder) -> None:
    part = table.write_part(0, rows())
    assert part is not None
    table.publish([part])
    content, manifest = content_of(table.location), table.manifest()
    assert manifest is not None and manifest.parts == (part,)
    assert (part.rows, part.failed) == (ROWS, 0)
    assert (part.bytes, part.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert [row["id"] for row in table.rows(["id"])] == [str(number) for number in range(ROWS)]
    assert table.find_damaged_parts([part]) == []
    table.publish([])
    table.remove_unlisted_files()
    assert table.find_damaged_parts([part]) == [part]


def test_a_part_that_others_wrote_is_refused(table: TableFolder) -> None:
    """A manifest from somebody else may list it with its right digest."""
    whole = table.write_part(0, rows(3))
    assert whole is not None
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"id": ["a"], "document": ["b"]}), file)
    for content, reason in ((b"PAR1 and no more", "not one that"), (file.getvalue(), "no column answer")):
        with fsspec.open(f"{table.location}/{FIRST}", "wb") as part_file:
            part_file.write(content)
        part = replace(whole, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        table.publish([part])
        with pytest.raises(CorpusError, match=f"the part {FIRST} of .*{reason}"):
            list(table.rows(["id", "error"]))


def test_a_part_that_fails_during_writing_leaves_no_file(table: TableFolder) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield from rows()
        raise ValueError("no more rows")

    with pytest.raises(ValueError, match="no more rows"):
        table.write_part(0, broken())
    assert table.write_part(0, ()) is None
    if "://" not in table.location:
        assert [path.name for path in Path(table.location).iterdir()] == ["_manifest.json"]


def test_a_part_goes_to_the_disk_as_its_rows_come(tmp_path: Path) -> None:
    table, sizes = TableFolder(str(tmp_path)), []
    table.take_over({}, "rows")

    def watch_rows() -> Iterator[dict[str, Any]]:
        for row in rows():
            sizes.append(sum(path.stat().st_size for path in tmp_path.glob(f".{FIRST}-*")))
            yield row

    table.write_part(0, watch_rows())
    assert sizes[-1] > (tmp_path / FIRST).stat().st_size / 2
