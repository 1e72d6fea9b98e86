"""Every kind of corpus source, and the sources that are refused, with real files, tables, datasets and servers."""

from __future__ import annotations

import json
import os
import pickle
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock

import aiohttp
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


def read_texts(inputs: CorpusInputs, folder: Path) -> dict[str, str]:
    """Return each document's text, or its error, by name."""
    store, texts_by_name = DocumentStore(folder / "store"), {}
    for listed_document in inputs.documents():
        document = pickle.loads(pickle.dumps(listed_document))  # as an engine does to pass it to another process
        try:
            with pickle.loads(pickle.dumps(inputs.access)).open_document(document) as source:
                reference = store.add(source)
                texts_by_name[document.name] = store.read(reference, 0, reference["size"])
        except DocumentError as error:
            texts_by_name[document.name] = f"{type(error).__name__}: {error}"
    return texts_by_name


@pytest.fixture
def input_folder(tmp_path: Path) -> Path:
    ((folder := tmp_path / "in") / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    (folder / "sub/b.md").write_text("two")
    (folder / ".hidden").write_text("no")
    return folder


# Files


def test_hidden_files_of_a_folder_are_read_only_if_named(input_folder: Path, tmp_path: Path) -> None:
    inputs = open_inputs(str(input_folder))
    assert read_texts(inputs, tmp_path) == {"a.txt": "one", "sub/b.md": "two"}
    assert inputs.total() == (2, 6) and not list(inputs.ids())
    assert read_texts(open_inputs(f"{input_folder}/*"), tmp_path) == {"a.txt": "one"}
    assert read_texts(open_inputs(f"{input_folder}/.h*"), tmp_path) == {".hidden": "no"}


@pytest.mark.parametrize("source", ["folder", "folder/*.txt", "table.csv", "memory://bucket/none/"])
def test_a_corpus_without_documents_is_an_error(source: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/.hidden").write_text("no")
    (tmp_path / "table.csv").write_text("t\n")
    inputs = open_inputs(source if "://" in source else f"{tmp_path}/{source}", columns=InputColumns(text="t"))
    with pytest.raises(DocumentError, match=r"there are no documents in .*Check the name"):
        list(inputs.documents())


def test_single_file_is_a_corpus_of_one_document(input_folder: Path, tmp_path: Path) -> None:
    assert read_texts(open_inputs(str(input_folder / "a.txt")), tmp_path) == {"a.txt": "one"}
    (tmp_path / "link.txt").symlink_to(input_folder / "a.txt")
    assert read_texts(open_inputs(str(tmp_path / "link.txt")), tmp_path) == {"link.txt": "one"}


def test_a_link_that_replaces_a_listed_file_is_not_read(input_folder: Path, tmp_path: Path) -> None:
    inputs = open_inputs(str(input_folder))
    listed_document = next(source for source in inputs.documents() if source.name == "a.txt")
    (input_folder / "a.txt").symlink_to((input_folder / "a.txt").rename(tmp_path / "outside.txt"))
    refusal = pytest.raises(DocumentError, match="leads out of its folder now")
    with inputs.access.open_document(listed_document) as source, refusal:
        DocumentStore(tmp_path / "documents").add(source)


@pytest.mark.parametrize("pattern", ["", "/**", "/*", "/*/*", "/**/*.txt"])
def test_links_out_of_the_folder_and_loops_are_not_followed(input_folder: Path, tmp_path: Path, pattern: str) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "secret.txt").write_text("secret")
    (input_folder / "link.txt").symlink_to(tmp_path / "private/secret.txt")
    (input_folder / "inside.txt").symlink_to(input_folder / "a.txt")
    (input_folder / "broken.txt").symlink_to(input_folder / "nothing")
    (input_folder / "loop.txt").symlink_to(input_folder / "loop.txt")
    (input_folder / "outside.txt").symlink_to(tmp_path / "private")
    (input_folder / "sub/deep.txt").symlink_to("../../private")
    (input_folder / "self.txt").symlink_to(input_folder)
    os.mkfifo(input_folder / "pipe.txt")
    documents = read_texts(open_inputs(f"{input_folder}{pattern}"), tmp_path)
    assert not {"self.txt", "pipe.txt"} & {*documents} and "secret" not in documents.values()
    if pattern != "/*/*":
        assert documents["inside.txt"] == "one"
        assert "is outside the" in documents["link.txt"] and "is outside the" in documents["outside.txt"]
        assert "does not exist" in documents["broken.txt"] and "cannot be resolved" in documents["loop.txt"]
    assert pattern == "/*" or "is outside the" in documents["sub/deep.txt"]


def test_unreadable_folder_is_an_error_and_a_file_that_vanishes_is_left_out(input_folder: Path, monkeypatch) -> None:
    inputs, info_name = open_inputs(str(input_folder)), "fsspec.implementations.local.LocalFileSystem.info"
    file_infos = [{"name": f"{input_folder}/{name}", "type": "file"} for name in "ab"]
    with monkeypatch.context() as patch:
        patch.setattr(info_name, Mock(side_effect=[FileNotFoundError(), *file_infos]))
        assert [document.name for document in inputs.documents()] == ["a", "b"]
    monkeypatch.setattr(os, "scandir", Mock(side_effect=[os.scandir(input_folder), PermissionError(13, "denied")]))
    with pytest.raises(DocumentError, match="no permission"):
        list(inputs.documents())


def test_missing_and_special_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for name in (f"{tmp_path}/missing", "~nobody-here/missing", f"{tmp_path}/pipe.txt"):
        with pytest.raises(DocumentError, match="not a regular file" if "pipe" in name else "there is no file"):
            list(open_inputs(name).documents())
    (tmp_path / "t.jsonl").write_text('{"path": "pipe.txt"}')
    assert "not a regular file" in read_texts(open_inputs(str(tmp_path / "t.jsonl")), tmp_path)["t.jsonl#0"]


def test_document_above_the_size_limit_has_an_error_instead_of_a_text(input_folder: Path, tmp_path: Path) -> None:
    inputs = open_inputs(str(input_folder), access=SourceAccess(max_bytes=2))
    assert all("has more than 2 bytes" in text for text in read_texts(inputs, tmp_path).values())


# Tables


def write_table(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"t.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    else:
        delimiter = "\t" if suffix == "tsv" else ","
        lines = [delimiter.join(rows[0]), *(delimiter.join(f'"{value}"' for value in row.values()) for row in rows)]
        path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv", "tsv"])
def test_tables_of_every_format_have_a_document_for_each_row(tmp_path: Path, suffix: str) -> None:
    path = write_table(tmp_path, suffix, [{"name": "x", "text": "one"}, {"name": "y", "text": "two, three\nfour"}])
    inputs = open_inputs(str(path))
    assert read_texts(inputs, tmp_path) == {f"t.{suffix}#0": "one", f"t.{suffix}#1": "two, three\nfour"}
    assert inputs.total().documents == 2
    inputs_with_ids = open_inputs(str(path), columns=InputColumns(id="name"))
    assert list(read_texts(inputs_with_ids, tmp_path)) == ["x", "y"] and list(inputs_with_ids.ids()) == ["x", "y"]
    versions, later_versions = [[document.version for document in open_inputs(str(path)).documents()] for _ in range(2)]
    assert versions == later_versions and len(set(versions)) == 2


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_missing_column_error_lists_the_columns_of_the_table(tmp_path: Path, suffix: str) -> None:
    path = write_table(tmp_path, suffix, [{"body": "one", "n": "1"}])
    for columns in (InputColumns(), InputColumns(text="words"), InputColumns(text="body", id="key")):
        with pytest.raises(DocumentError, match="columns are: body, n"):
            list(open_inputs(str(path), columns=columns).documents())
    assert read_texts(open_inputs(str(path), columns=InputColumns(text="body")), tmp_path) == {f"t.{suffix}#0": "one"}


def test_paths_in_a_table_may_not_leave_its_folder(input_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    paths = ["a.txt", "sub/b.md", "../secret.txt", str(tmp_path / "secret.txt"), "missing.txt", "file:///etc/passwd",
             "s3://bucket/key", "http://127.0.0.1/x", "http://169.254.169.254/latest", "\0",
             "zip://x::https://host/y.zip"]  # fmt: skip
    path = write_table(input_folder, "jsonl", [{"path": path} for path in paths])
    texts = list(read_texts(open_inputs(str(path)), tmp_path).values())
    assert texts[:2] == ["one", "two"]
    assert all("is outside the" in text for text in (*texts[2:4], *texts[5:7])) and "does not exist" in texts[4]
    assert all("is not a public address" in text for text in texts[7:9])
    assert "is not a path" in texts[9] and "chain of URLs" in texts[10]
    with pytest.raises(RefusedSourceError, match="is outside the"):  # a dataset of the hub has no folder
        SourceAccess().resolve_below_root("pyproject.toml")


def test_damaged_line_fails_one_document_and_a_damaged_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "one"}\n{"text": \n[1]\n\n{"text": "two"}\n{"other": 1}\n')
    texts = list(read_texts(open_inputs(str(tmp_path / "t.jsonl")), tmp_path).values())
    assert texts[0] == "one" and texts[3] == "two"
    assert "line 2 is not JSON" in texts[1] and "not a JSON object" in texts[2] and "has no value" in texts[4]
    (tmp_path / "t.csv").write_text('id,text\n1,5,000 euros\n2,"one",, \n')
    texts = list(read_texts(open_inputs(str(tmp_path / "t.csv")), tmp_path).values())
    assert "line 2 has more cells than the header" in texts[0] and texts[1] == "one"
    (tmp_path / "t.csv").write_text('text\none\n"two" and three\n')
    (tmp_path / "t.parquet").write_bytes(b"PAR1 no")
    pq.write_table(pa.table({"text": pa.array([2**62], pa.timestamp("us"))}), tmp_path / "date.parquet")
    for name, line in (("t.csv", "line 3: "), ("t.parquet", ""), ("date.parquet", "")):
        with pytest.raises(DocumentError, match=f"{name} cannot be read as a table: {line}"):
            list(open_inputs(str(tmp_path / name)).documents())


def test_text_shared_by_many_rows_is_held_in_memory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memagent_graph.storage.parquet_rows._MAX_SLICE_BYTES", 2**20)
    pq.write_table(pa.table({"text": ["a" * 2**20] * 24}), tmp_path / "t.parquet", dictionary_pagesize_limit=2**22)
    memory_pool, allocated_before, peak_bytes = pa.default_memory_pool(), pa.total_allocated_bytes(), 0
    tracemalloc.start()
    for document in open_inputs(str(tmp_path / "t.parquet")).documents():
        peak_bytes = max(peak_bytes, memory_pool.bytes_allocated() - allocated_before)
        assert document.size == 2**20
    assert peak_bytes < 2**23 and tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


def test_rows_with_small_lists_and_maps_are_read_from_a_large_batch(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("memagent_graph.storage.parquet_rows._MAX_LIST_BYTES", 2000)
    rows = [{"a": ["a" * 99] * 9, "b": [("a", "b"), ("c", None)]}, {"a": None, "b": []}, {"a": [], "b": None}] * 9
    schema = pa.schema([("a", pa.list_(pa.string())), ("b", pa.map_(pa.string(), pa.string())), ("text", pa.string())])
    pq.write_table(pa.Table.from_pylist([{**row, "text": "one"} for row in rows], schema), tmp_path / "t.parquet")
    inputs = open_inputs(str(tmp_path / "t.parquet"), columns=InputColumns(copied=("a", "b")))
    assert [document.metadata for document in inputs.documents()] == json.loads(json.dumps(rows))


def test_columns_of_json_lines_are_taken_from_all_rows(input_folder: Path, tmp_path: Path) -> None:
    rows = [{"path": "a.txt"}, {"text": "two", "year": 2024}, {"path": "sub/b.md", "text": None}, {"other": 1}]
    (input_folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    inputs = open_inputs(str(input_folder / "t.jsonl"), columns=InputColumns(copied=("year",)))
    assert [row.metadata for row in inputs.documents()] == [{"year": year} for year in (None, 2024, None, None)]
    assert list(read_texts(inputs, tmp_path).values())[:3] == ["one", "two", "two"]
    assert "'text' has no value" in read_texts(inputs, tmp_path)["t.jsonl#3"]


def test_default_name_of_a_row_that_equals_another_id_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"id": "t.jsonl#1", "text": "one"}\n{"id": null, "text": "two"}\n')
    with pytest.raises(DocumentError, match=r"rows 0 and 1 .* have the same id 't\.jsonl#1'"):
        require_unique_ids(open_inputs(str(tmp_path / "t.jsonl"), columns=InputColumns(id="id")))


@pytest.mark.parametrize(("suffix", "text"), [("csv", "text\nfünf “\n"), ("jsonl", '{"text": "fünf “"}')])
def test_table_in_another_charset_is_read_with_the_encoding_option(tmp_path: Path, suffix: str, text: str) -> None:
    (path := tmp_path / ("long" * 60) / f"t.{suffix}").parent.mkdir()
    for codec, encoding in (("utf-8-sig", "utf-8"), ("cp1252", "iso-8859-1")):
        path.write_text(text, codec)
        inputs = open_inputs(str(path), access=SourceAccess(encoding=encoding))
        assert read_texts(inputs, tmp_path) == {f"t.{suffix}#0": "fünf “"}
    for encoding, message in ((None, "encoding"), ("nope", "there is no charset 'nope'")):
        with pytest.raises(DocumentError, match=message):
            list(open_inputs(str(path), access=SourceAccess(encoding=encoding)).documents())


def test_several_tables_are_one_corpus(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    assert read_texts(open_inputs(f"{tmp_path}/*.jsonl"), tmp_path) == {"x.jsonl#0": "x", "y.jsonl#0": "y"}
    (tmp_path / "z.jsonl").symlink_to("/etc/passwd")
    with pytest.raises(DocumentError, match=r"z\.jsonl is a link, and .* is outside the .*Name this table"):
        open_inputs(f"{tmp_path}/*.jsonl")


def test_dataset_saved_to_disk_is_read_as_a_table(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(id=datasets.Json(), text=datasets.Value("string"))  # ids of several types
    datasets.Dataset.from_dict({"id": ["a", 2], "text": ["one", "two"]}, features).save_to_disk(str(tmp_path / "saved"))
    inputs = open_inputs(f"dataset:{tmp_path / 'saved'}", columns=InputColumns(id="id"))
    assert read_texts(inputs, tmp_path) == {"a": "one", "2": "two"} and inputs.total().documents == 2
    assert list(inputs.ids() or ()) == ["a", "2"]
    with pytest.raises(DocumentError, match="cannot be loaded"):
        list(open_inputs(f"dataset:{tmp_path / 'none'}").documents())


def test_dataset_folder_cannot_name_files_outside_it(tmp_path: Path) -> None:
    import datasets

    image_type = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features({"text": image_type, "path": datasets.Value("string")})
    rows = {"text": [{"bytes": None, "path": str(tmp_path / "outside.png")}, None], "path": [None, "pyproject.toml"]}
    datasets.Dataset.from_dict(rows, features).save_to_disk(str(tmp_path / "saved"))
    features["text"] = datasets.Image()
    (tmp_path / "saved/dataset_info.json").write_text(json.dumps({"features": features.to_dict()}))
    texts = list(read_texts(open_inputs(f"dataset:{tmp_path / 'saved'}"), tmp_path).values())
    assert "a value of type dict" in texts[0] and "pyproject.toml does not exist" in texts[1]
    (tmp_path / "outside.jsonl").write_text('{"text": "secret"}\n', "utf-8")
    (tmp_path / "dataset").mkdir()
    readme = "---\nconfigs:\n- config_name: default\n  data_files: ../outside.jsonl\n---\n"
    (tmp_path / "dataset" / "README.md").write_text(readme, "utf-8")
    with pytest.raises(DocumentError, match="not a saved dataset"):
        list(open_inputs(f"dataset:{tmp_path / 'dataset'}").documents())


def test_missing_datasets_library_error_names_the_package(monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DocumentError, match="pip install datasets"):
        list(open_inputs("dataset:squad").documents())


# URLs


@contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """Serve the files of a folder over HTTP; yield the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("timeout", [None, 60, aiohttp.ClientTimeout(60, sock_read=5)])
def test_private_address_is_refused_unless_allowed(input_folder: Path, monkeypatch: Any, timeout: Any) -> None:
    monkeypatch.setitem(fsspec.config.conf, "http", {"client_kwargs": {"timeout": timeout}})
    with serve_folder(input_folder) as url:
        with pytest.raises(RefusedSourceError, match="allow_private_addresses"):
            open_inputs(f"{url}/a.txt")
        access = SourceAccess(allow_private=True)
        (input_folder / "large.txt").write_text("a" * 9 * 2**20)  # more than two blocks; the server has no ranges
        names = ("a.txt", "large.txt", "b.txt")
        texts = [read_texts(open_inputs(f"{url}/{name}", access=access), input_folder.parent)[name] for name in names]
        assert texts[0] == "one" and set(texts[1]) == {"a"}
        assert "does not exist" in texts[2] or "cannot be fetched" in texts[2]
        filesystem, _ = access.open_filesystem(url)
        limits = fsspec.asyn.sync(filesystem.loop, filesystem.set_session).timeout
        assert (limits.total, limits.sock_read) == ((60 if timeout else 3600), getattr(timeout, "sock_read", 300))


def test_host_name_of_a_private_address_is_refused(input_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """This covers redirects too: every connection is checked, whatever led to it."""
    resolve = partial(socket.getaddrinfo, "127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *arguments, **options: resolve(*arguments, **options))
    with serve_folder(input_folder) as url:
        location = f"http://public.example:{url.rpartition(':')[2]}/a.txt"
        refusal = pytest.raises(RefusedSourceError, match="is not a public address")
        with refusal, SourceAccess().open_document(CorpusDocument(name="a.txt", location=location)) as source:
            DocumentStore(tmp_path / "store").add(source)


@pytest.mark.parametrize("address", [
    "127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "::1", "fe80::1%eth0", "fd00::1",
    "::ffff:10.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "::127.0.0.1", "::ffff:0:127.0.0.1", "fec0::1", "5f00::1",
    "3fff::1", "224.0.0.1", "100.64.0.1", "2002:7f00:1::1",
])  # fmt: skip
def test_non_public_addresses_are_refused(address: str) -> None:
    with pytest.raises(RefusedSourceError, match="is not a public address"):
        require_public_address(address)


def test_public_addresses_are_not_refused() -> None:
    for address in ("93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"):
        require_public_address(address)


@pytest.mark.parametrize("url", ["simplecache::s3://b/x", "ssh://host/x", "git://host/x", "ftp://host/x", "jar://x"])
def test_chained_urls_and_other_schemes_are_refused(url: str) -> None:
    with pytest.raises(RefusedSourceError, match="is a chain of URLs" if "::" in url else "which is not allowed"):
        open_inputs(url)


def test_objects_and_tables_of_an_object_store_are_read_like_files(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    store.pipe({"/bucket/in/a.txt": b"one", "/bucket/in/sub/b.txt": b"two", "/bucket/in/c.md": b"3"})
    assert read_texts(open_inputs("memory://bucket/in"), tmp_path) == {"a.txt": "one", "sub/b.txt": "two", "c.md": "3"}
    assert read_texts(open_inputs("memory://bucket/in/*.md"), tmp_path) == {"c.md": "3"}
    assert read_texts(open_inputs("memory://bucket/in/**/*.txt"), tmp_path) == {"a.txt": "one", "sub/b.txt": "two"}
    assert read_texts(open_inputs("memory://bucket/in/a.txt"), tmp_path) == {"a.txt": "one"}
    store.pipe("/bucket/x.csv", b"path\nin/a.txt\n../b.txt\na?/../../b.txt\na#/../../b.txt\n")
    texts = list(read_texts(open_inputs("memory://bucket/x.csv"), tmp_path).values())
    assert texts[0] == "one" and len(texts) == 4 and all("is outside" in text for text in texts[1:])


def test_object_store_errors_do_not_contain_credentials() -> None:
    with pytest.raises(DocumentError) as error:
        open_inputs("s3://key:secret@bucket/x")
    assert "secret" not in str(error.value)
