"""How a part of a table is written: as its rows come, whole or not at all, on a disk and in a store."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from memagent_corpus import Row, TableFolder
from memagent_corpus.table_folder import part_name

ROWS = 5000


def rows(count: int = ROWS) -> Iterator[Row]:
    """Rows whose answers cannot be compressed well."""
    for number in range(count):
        yield Row(id=f"{number}", document=f"{number}.txt", digest=None, question="?", answer=os.urandom(256).hex())


def content_of(location: str) -> bytes:
    if "://" not in location:
        return (Path(location) / part_name(0)).read_bytes()
    return bytes(fsspec.filesystem("memory").cat_file(f"{location.removeprefix('memory://')}/{part_name(0)}"))


@pytest.fixture(params=["disk", "store"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> TableFolder:
    table = TableFolder(str(tmp_path) if request.param == "disk" else f"memory://{tmp_path.name}/table")
    table.take_over({}, "rows")
    return table


def test_the_manifest_has_the_size_and_digest_of_what_was_written(table: TableFolder) -> None:
    table.write_part(0, rows())
    content, manifest = content_of(table.location), table.manifest()
    assert manifest is not None
    (part,) = manifest.parts
    assert (part.rows, part.failed) == (ROWS, 0)
    assert (part.bytes, part.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert [row["id"] for row in table.rows(["id"])] == [str(number) for number in range(ROWS)]


def test_what_fails_while_it_is_written_leaves_nothing(table: TableFolder) -> None:
    def broken() -> Iterator[Row]:
        yield from rows()
        raise ValueError("no more rows")

    with pytest.raises(ValueError, match="no more rows"):
        table.write_part(0, broken())
    assert table.unlisted_parts() == []
    table.write_part(0, ())
    manifest = table.manifest()
    assert manifest is not None and manifest.parts == ()
    if "://" not in table.location:
        assert [path.name for path in Path(table.location).iterdir()] == ["_manifest.json"]


def test_a_part_goes_to_the_disk_as_its_rows_come(tmp_path: Path) -> None:
    table, sizes = TableFolder(str(tmp_path)), []
    table.take_over({}, "rows")

    def watched() -> Iterator[Row]:
        for row in rows():
            sizes.append(sum(path.stat().st_size for path in tmp_path.glob(f".{part_name(0)}-*")))
            yield row

    table.write_part(0, watched())
    assert sizes[-1] > (tmp_path / part_name(0)).stat().st_size / 2
