"""Everything that a corpus can be, and what is refused: each with a real file, archive, table or server."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memagent_corpus import CorpusDocument, CorpusInputs, open_inputs
from memagent_corpus.corpus_inputs import require_unique_ids
from memagent_corpus.source_access import SourceAccess, require_public_address
from memagent_corpus.table_inputs import InputColumns
from memagent_graph import DocumentStore
from memagent_graph.errors import DocumentError, RefusedSourceError


def texts(inputs: CorpusInputs, folder: Path) -> dict[str, str]:
    """Each document's text, or its error."""
    store, texts = DocumentStore(folder / "store"), {}
    for listed in inputs.documents():
        document = pickle.loads(pickle.dumps(listed))  # engines pass them around
        try:
            with pickle.loads(pickle.dumps(inputs.access)).open_document(document) as source:
                reference = store.add(source)
                texts[document.name] = store.read(reference, 0, reference["size"])
        except DocumentError as error:
            texts[document.name] = f"{type(error).__name__}: {error}"
    return texts


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    (folder / "sub/b.md").write_text("two")
    (folder / ".hidden").write_text("no")
    return folder


# Files


def test_a_folder_is_its_files_by_their_paths_below_it_and_hidden_ones_if_named(files: Path, tmp_path: Path) -> None:
    inputs = open_inputs(str(files))
    assert texts(inputs, tmp_path) == {"a.txt": "one", "sub/b.md": "two"}
    assert inputs.total() == (2, 6) and not list(inputs.ids())
    assert texts(open_inputs(f"{files}/*"), tmp_path) == {"a.txt": "one"}
    assert texts(open_inputs(f"{files}/.h*"), tmp_path) == {".hidden": "no"}


@pytest.mark.parametrize("source", ["folder", "folder/*.txt", "table.csv", "memory://bucket/none/"])
def test_a_corpus_without_documents_is_an_error(source: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/.hidden").write_text("no")
    (tmp_path / "table.csv").write_text("t\n")
    inputs = open_inputs(source if "://" in source else f"{tmp_path}/{source}", columns=InputColumns(text="t"))
    with pytest.raises(DocumentError, match=r"there are no documents in .*Check the name"):
        list(inputs.documents())


def test_one_file_is_a_corpus_of_one(files: Path, tmp_path: Path) -> None:
    assert texts(open_inputs(str(files / "a.txt")), tmp_path) == {"a.txt": "one"}
    (tmp_path / "link.txt").symlink_to(files / "a.txt")
    assert texts(open_inputs(str(tmp_path / "link.txt")), tmp_path) == {"link.txt": "one"}


def test_a_link_that_replaces_a_listed_file_is_not_read(files: Path, tmp_path: Path) -> None:
    inputs = open_inputs(str(files))
    document_before = next(document for document in inputs.documents() if document.name == "a.txt")
    (files / "a.txt").rename(tmp_path / "outside.txt")
    (files / "a.txt").symlink_to(tmp_path / "outside.txt")
    with (
        inputs.access.open_document(document_before) as document,
        pytest.raises(DocumentError, match="leads out of its folder now"),
    ):
        DocumentStore(tmp_path / "documents").add(document)


@pytest.mark.parametrize("pattern", ["", "/**", "/*", "/*/*", "/**/*.txt"])
def test_no_link_leads_out_of_the_folder_or_around_in_it(files: Path, tmp_path: Path, pattern: str) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "secret.txt").write_text("secret")
    (files / "link.txt").symlink_to(tmp_path / "private/secret.txt")
    (files / "inside.txt").symlink_to(files / "a.txt")
    (files / "broken.txt").symlink_to(files / "nothing")
    (files / "loop.txt").symlink_to(files / "loop.txt")
    (files / "outside.txt").symlink_to(tmp_path / "private")
    (files / "sub/deep.txt").symlink_to("../../private")
    (files / "self.txt").symlink_to(files)
    os.mkfifo(files / "pipe.txt")
    documents = texts(open_inputs(f"{files}{pattern}"), tmp_path)
    assert "self.txt" not in documents and "pipe.txt" not in documents
    assert "secret" not in set(documents.values())
    if pattern != "/*/*":
        assert documents["inside.txt"] == "one"
        for name in ("link.txt", "outside.txt"):
            assert "is outside the" in documents[name]
        assert "does not exist" in documents["broken.txt"] and "cannot be resolved" in documents["loop.txt"]
    if pattern != "/*":
        assert "is outside the" in documents["sub/deep.txt"]


def test_a_folder_that_cannot_be_listed_is_an_error_at_any_depth(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(folder: Any) -> Any:
        if str(folder).endswith("sub"):
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DocumentError, match="no permission"):
        list(open_inputs(str(files)).documents())


def test_missing_and_special_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="there is no file or folder"):
        open_inputs(str(tmp_path / "missing"))
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DocumentError, match="not a regular file"):
        list(open_inputs(str(tmp_path / "pipe.txt")).documents())
    (tmp_path / "t.jsonl").write_text('{"path": "pipe.txt"}')
    assert "not a regular file" in texts(open_inputs(str(tmp_path / "t.jsonl")), tmp_path)["t.jsonl#0"]


def test_a_document_that_is_larger_than_allowed_is_one_with_an_error(files: Path, tmp_path: Path) -> None:
    inputs = open_inputs(str(files), access=SourceAccess(max_bytes=2))
    assert all("has more than 2 bytes" in text for text in texts(inputs, tmp_path).values())


# Tables


def table(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"t.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    else:
        mark = "\t" if kind == "tsv" else ","
        lines = [mark.join(rows[0]), *(mark.join(f'"{value}"' for value in row.values()) for row in rows)]
        path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv", "tsv"])
def test_a_table_of_texts(tmp_path: Path, kind: str) -> None:
    path = table(tmp_path, kind, [{"name": "x", "text": "one"}, {"name": "y", "text": "two, three\nfour"}])
    inputs = open_inputs(str(path))
    assert texts(inputs, tmp_path) == {f"t.{kind}#0": "one", f"t.{kind}#1": "two, three\nfour"}
    assert inputs.total().documents == 2
    named = open_inputs(str(path), columns=InputColumns(id="name"))
    assert list(texts(named, tmp_path)) == ["x", "y"] and list(named.ids()) == ["x", "y"]
    before, after = [[document.version for document in open_inputs(str(path)).documents()] for _ in range(2)]
    assert before == after and len(set(before)) == 2


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_a_missing_column_is_refused_with_those_that_are_there(tmp_path: Path, kind: str) -> None:
    path = table(tmp_path, kind, [{"body": "one", "n": "1"}])
    for columns in (InputColumns(), InputColumns(text="words"), InputColumns(text="body", id="key")):
        with pytest.raises(DocumentError, match="columns are: body, n"):
            list(open_inputs(str(path), columns=columns).documents())
    assert texts(open_inputs(str(path), columns=InputColumns(text="body")), tmp_path) == {f"t.{kind}#0": "one"}


def test_a_column_of_paths_stays_below_the_table_s_folder(files: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    paths = ["a.txt", "sub/b.md", "../secret.txt", str(tmp_path / "secret.txt"), "missing.txt", "file:///etc/passwd",
             "s3://bucket/key", "http://127.0.0.1/x", "http://169.254.169.254/latest", "\0",
             "zip://x::https://host/y.zip"]  # fmt: skip
    path = table(files, "jsonl", [{"path": path} for path in paths])
    rows = list(texts(open_inputs(str(path)), tmp_path).values())
    assert rows[:2] == ["one", "two"]
    assert all("is outside the" in text for text in (*rows[2:4], *rows[5:7]))
    assert "does not exist" in rows[4]
    assert all("is not a public address" in text for text in rows[7:9])
    assert "is not a path" in rows[9] and "chain of URLs" in rows[10]


def test_a_damaged_line_is_a_document_with_an_error_and_a_damaged_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "one"}\n{"text": \n[1]\n\n{"text": "two"}\n{"other": 1}\n')
    rows = list(texts(open_inputs(str(tmp_path / "t.jsonl")), tmp_path).values())
    assert rows[0] == "one" and rows[3] == "two"
    assert "line 2 is not JSON" in rows[1] and "not a JSON object" in rows[2] and "has no value" in rows[4]
    (tmp_path / "t.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DocumentError, match="cannot be read as a table"):
        list(open_inputs(str(tmp_path / "t.parquet")).documents())


def test_a_text_that_many_rows_share_is_not_in_memory_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memagent_graph.storage.parquet_rows._SMALL_BYTES", 2**20)
    table = pa.table({"text": ["a" * 2**20] * 24})
    pq.write_table(table, tmp_path / "t.parquet", dictionary_pagesize_limit=2**22)
    del table
    pool, before, peak = pa.default_memory_pool(), pa.total_allocated_bytes(), 0
    tracemalloc.start()
    for document in open_inputs(str(tmp_path / "t.parquet")).documents():
        peak = max(peak, pool.bytes_allocated() - before)
        assert document.size == 2**20
    assert peak < 2**23 and tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


def test_columns_come_from_all_rows_of_json_lines(files: Path, tmp_path: Path) -> None:
    rows = [{"path": "a.txt"}, {"text": "two", "year": 2024}, {"path": "sub/b.md", "text": None}, {"other": 1}]
    path = files / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    inputs = open_inputs(str(path), columns=InputColumns(copied=("year",)))
    assert [document.metadata for document in inputs.documents()] == [
        {"year": year} for year in (None, 2024, None, None)
    ]
    assert list(texts(inputs, tmp_path).values())[:3] == ["one", "two", "two"]
    assert "'text' has no value" in texts(inputs, tmp_path)["t.jsonl#3"]


def test_the_name_of_a_row_without_an_id_is_no_other_row_s_id(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"id": "t.jsonl#1", "text": "one"}\n{"id": null, "text": "two"}\n')
    inputs = open_inputs(str(tmp_path / "t.jsonl"), columns=InputColumns(id="id"))
    with pytest.raises(DocumentError, match=r"rows 0 and 1 .* have the same id 't\.jsonl#1'"):
        require_unique_ids(inputs)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table_in_another_charset(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"t.{kind}"
    path.write_bytes("text\nfünf\n".encode("latin-1") if kind == "csv" else '{"text": "fünf"}'.encode("latin-1"))
    assert "fünf" in texts(open_inputs(str(path), access=SourceAccess(encoding="latin-1")), tmp_path).values()
    with pytest.raises(DocumentError, match=r"encoding|neither a column"):
        list(open_inputs(str(path)).documents())


def test_several_tables_are_one_corpus(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    assert texts(open_inputs(f"{tmp_path}/*.jsonl"), tmp_path) == {"x.jsonl#0": "x", "y.jsonl#0": "y"}


def test_a_dataset_saved_to_disk(tmp_path: Path) -> None:
    import datasets

    rows = {"id": ["a", "b"], "text": ["one", "two"]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    inputs = open_inputs(f"dataset:{tmp_path / 'saved'}", columns=InputColumns(id="id"))
    assert texts(inputs, tmp_path) == {"a": "one", "b": "two"} and inputs.total().documents == 2
    assert list(inputs.ids() or ()) == ["a", "b"]
    with pytest.raises(DocumentError, match="cannot be loaded"):
        list(open_inputs(f"dataset:{tmp_path / 'none'}").documents())


def test_the_readme_of_a_dataset_s_folder_names_no_file(tmp_path: Path) -> None:
    (tmp_path / "outside.jsonl").write_text('{"text": "secret"}\n', "utf-8")
    (tmp_path / "theirs").mkdir()
    table = "---\nconfigs:\n- config_name: default\n  data_files: ../outside.jsonl\n---\n"
    (tmp_path / "theirs" / "README.md").write_text(table, "utf-8")
    with pytest.raises(DocumentError, match="not a saved dataset"):
        list(open_inputs(f"dataset:{tmp_path / 'theirs'}").documents())


def test_without_the_library_a_dataset_is_refused_with_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DocumentError, match="pip install datasets"):
        list(open_inputs("dataset:squad").documents())


# URLs


@contextmanager
def web(folder: Path) -> Iterator[str]:
    """A web server for the files of a folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_private_address_is_refused_unless_it_is_allowed(files: Path, tmp_path: Path) -> None:
    with web(files) as url:
        with pytest.raises(RefusedSourceError, match="allow_private_addresses"):
            open_inputs(f"{url}/a.txt")
        allowed = SourceAccess(allow_private=True)
        assert texts(open_inputs(f"{url}/a.txt", access=allowed), tmp_path) == {"a.txt": "one"}
        missing = texts(open_inputs(f"{url}/b.txt", access=allowed), tmp_path)
        assert "does not exist" in missing["b.txt"] or "cannot be fetched" in missing["b.txt"]


def test_a_name_that_leads_to_a_private_address_is_refused_when_it_connects(
    files: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """A redirect ends in the same place: every connection is checked, whatever led to it."""
    import socket

    getaddrinfo = socket.getaddrinfo

    def answers(host: Any, *arguments: Any, **options: Any) -> Any:
        return getaddrinfo("127.0.0.1" if host == "public.example" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answers)
    with web(files) as url:
        location = f"http://public.example:{url.rpartition(':')[2]}/a.txt"
        document = CorpusDocument(name="a.txt", location=location)
        store = DocumentStore(tmp_path / "store")
        with (
            pytest.raises(RefusedSourceError, match="is not a public address"),
            SourceAccess().open_document(document) as one,
        ):
            store.add(one)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "::1", "fe80::1%eth0", "fd00::1",
     "::ffff:10.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "::127.0.0.1", "::ffff:0:127.0.0.1", "fec0::1", "5f00::1",
     "3fff::1", "224.0.0.1", "100.64.0.1", "2002:7f00:1::1"],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    with pytest.raises(RefusedSourceError, match="is not a public address"):
        require_public_address(address)


def test_public_addresses_are_not_refused() -> None:
    for address in ("93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"):
        require_public_address(address)


@pytest.mark.parametrize(
    "url", ["simplecache::s3://bucket/x", "ssh://host/x", "git://host/x", "ftp://host/x", "jar://x"]
)
def test_chained_urls_and_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(RefusedSourceError, match="is a chain of URLs" if "::" in url else "which is not allowed"):
        open_inputs(url)


def test_the_objects_of_a_store_are_its_files(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    store.pipe({"/bucket/in/a.txt": b"one", "/bucket/in/sub/b.txt": b"two", "/bucket/in/c.md": b"three"})
    assert texts(open_inputs("memory://bucket/in"), tmp_path) == {"a.txt": "one", "sub/b.txt": "two", "c.md": "three"}
    assert texts(open_inputs("memory://bucket/in/*.md"), tmp_path) == {"c.md": "three"}
    assert texts(open_inputs("memory://bucket/in/**/*.txt"), tmp_path) == {"a.txt": "one", "sub/b.txt": "two"}
    assert texts(open_inputs("memory://bucket/in/a.txt"), tmp_path) == {"a.txt": "one"}


def test_a_table_in_a_store(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    store.pipe({"/t/x.jsonl": b'{"path": "in/a.txt"}\n{"path": "../b.txt"}', "/t/in/a.txt": b"one", "/b.txt": b"no"})
    rows = texts(open_inputs("memory://t/x.jsonl"), tmp_path)
    assert rows["x.jsonl#0"] == "one" and "is outside" in rows["x.jsonl#1"]


def test_errors_of_a_stores_client_do_not_show_its_keys() -> None:
    with pytest.raises(DocumentError) as caught:
        open_inputs("s3://key:secret@bucket/x")
    assert "secret" not in str(caught.value)
