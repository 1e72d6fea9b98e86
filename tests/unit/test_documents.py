"""Documents from every kind of source: their text is stored exactly, and what cannot be read is a clear error."""

import io
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from langchain_core.documents import Document as LangChainDocument
from support.document_files import make_zip

from memagent_graph.converters import Block
from memagent_graph.documents import Document, SourceMark
from memagent_graph.errors import (
    DocumentError,
    DocumentMismatchError,
    EmptyDocumentError,
    EncodingError,
    UnsupportedDocumentError,
)

TEXT = "First line.\r\nSecond: naïve café, 日本語, 😀\n\n\x00 a NUL, a tab\t and no newline at the end"
GERMAN = "Der Müller mahlt das Korn, und die Bäckerin bäckt daraus schöne Brötchen. " * 5


def read_all(store, ref):
    return store.read(ref, 0, ref["size"])


@pytest.mark.parametrize(
    "source",
    [
        lambda folder: TEXT,
        lambda folder: TEXT.encode(),
        lambda folder: io.BytesIO(TEXT.encode()),
        lambda folder: io.StringIO(TEXT, newline=""),
        lambda folder: [TEXT[:10], TEXT[10:]],
        lambda folder: iter([TEXT.encode()[:25], TEXT.encode()[25:]]),
        lambda folder: Document.from_text(TEXT),
        lambda folder: (folder / "t.txt").write_bytes(TEXT.encode()) and folder / "t.txt",
        lambda folder: (folder / "t.md").write_bytes(TEXT.encode("utf-8-sig")) and folder / "t.md",
        lambda folder: TEXT.encode("utf-16"),
        lambda folder: TEXT.encode("utf-32"),
    ],
)
def test_any_kind_of_source_stores_the_exact_text_under_the_same_key(source, store, tmp_path):
    ref = store.add(Document.of(source(tmp_path)))
    assert (read_all(store, ref), ref["size"]) == (TEXT, len(TEXT.encode()))
    assert read_all(store, ref | {"size": 2**70}) == "".join(store.pieces(ref | {"size": 2**70})) == TEXT
    assert ref["key"] == store.add(TEXT)["key"]
    assert json.loads(json.dumps(ref)) == ref
    assert len(list((store.root / "texts").iterdir())) == 1
    assert not list(store.root.glob(".incoming-*"))


async def stream_text():
    yield "text"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        *((source, "is not a document") for source in (3, None, {"a": "b"}, [1, 2], object())),
        (stream_text(), r"asynchronous stream.*Collect its text"),
    ],
)
def test_invalid_documents_are_refused(source, message):
    with pytest.raises(DocumentError, match=message):
        Document.of(source)


@pytest.mark.parametrize("text", ["", " \n\t ", "\ufeff"])
def test_an_empty_document_is_refused(text, store):
    for document in (Document.from_text(text.replace("\ufeff", "")), Document.from_bytes(text.encode())):
        with pytest.raises(EmptyDocumentError):
            store.add(document)
    assert not [path for path in store.root.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("data", "description"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\x00", "an image"),
        (b"PK\x03\x04\x00\x00\xff", "zip"),
        (make_zip({"a.txt": "text\xff" * 10}), "zip"),
        (b"\x7fELF\x02\x01\x00\xff", "program"),
        (bytes(range(256)) * 40, "binary"),
        (b"\x01\x02\x03\x04" * 100, "binary"),
        (bytes(1000), "binary"),
    ],
)
def test_a_binary_file_is_refused_and_its_type_named(data, description, store, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(data)
    for document in (Document.from_path(path), Document.from_bytes(data), Document.from_stream([data])):
        with pytest.raises(UnsupportedDocumentError, match=f"(?i){description}.*(convert|unpack) it"):
            store.add(document)


def test_the_error_for_a_file_that_cannot_be_opened_gives_the_reason(store, tmp_path):
    with pytest.raises(DocumentError, match="does not exist"):
        store.add(Document.from_path(tmp_path / "none.txt"))
    with pytest.raises(DocumentError, match="is a directory"):
        store.add(Document.from_path(tmp_path))
    file = io.BytesIO(b"x")
    file.close()
    with pytest.raises(DocumentError, match="cannot be read"):
        store.add(Document.from_file(file))
    if os.geteuid() != 0:
        secret = tmp_path / "secret.txt"
        secret.write_text("x")
        secret.chmod(0)
        with pytest.raises(DocumentError, match="may not be read"):
            store.add(Document.from_path(secret))


def test_a_detected_charset_is_logged(store, caplog):
    assert read_all(store, store.add(Document.from_bytes(GERMAN.encode("cp1252"), name="old.txt"))) == GERMAN
    assert "old.txt is not UTF-8" in caplog.text


def test_a_declared_charset_is_used_and_an_unknown_one_refused(store):
    assert read_all(store, store.add(Document.from_bytes("naïve ż".encode("cp1250", "replace"), encoding="cp1250")))
    assert read_all(store, store.add(Document.from_bytes("ab".encode("utf-16-le"), encoding="utf-16-le"))) == "ab"
    for charset in ("utf-9", "base64", "punycode", "idna", "unicode_escape"):
        for data in (b"x", b"%PDF-1.4"):
            with pytest.raises(EncodingError, match=f"no charset '{charset}'"):
                store.add(Document.from_bytes(data, encoding=charset))


@pytest.mark.parametrize(
    ("data", "offset"),
    [
        (b"plain text, and one odd byte: \xff.", 30),
        (b"text that ends inside a character: \xc3", 35),
        (GERMAN.encode() + b"\xff" + GERMAN.encode(), len(GERMAN.encode())),
        (b"a" * ((1 << 20) - 1) + b"\xc3\xa9" + b"a" * 10 + b"\xe9", (1 << 20) + 11),
    ],
)
def test_undecodable_bytes_are_an_error_unless_replaced(data, offset, store):
    with pytest.raises(EncodingError, match=rf"utf-8.*offset {offset} .*use replace_undecodable"):
        store.add(Document.from_bytes(data))
    with pytest.raises(EncodingError, match=rf"offset {offset} "):
        store.add(Document.from_stream([data[:offset], data[offset:]]))
    text = read_all(store, store.with_options(replace_undecodable=True).add(Document.from_bytes(data)))
    assert text == data.decode("utf-8", "replace")


def test_utf16_without_a_byte_order_mark_is_an_error_that_names_the_encoding(store):
    with pytest.raises(EncodingError, match="Pass encoding utf-16-be"):
        store.add(Document.from_bytes(GERMAN.encode("utf-16-be")))
    with pytest.raises(EncodingError, match="Pass encoding utf-16-be"):
        store.add(Document.from_bytes("plain words alone".encode("utf-16-be")))
    with pytest.raises(EncodingError, match="Pass encoding utf-16-le"):
        store.add(Document.from_bytes(b"The code is 4711.".decode().encode("utf-16-le")))  # it is valid UTF-8, too
    with pytest.raises(EncodingError, match=r"no byte order mark.*Pass encoding utf-16-le or utf-16-be"):
        store.add(Document.from_bytes("text".encode("utf-16-le"), encoding="UTF-16"))


def test_undecodable_bytes_in_a_file_name_are_replaced(store, tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))
    try:
        path.write_text("some text")
    except OSError:
        pytest.skip("this file system has no such file names")
    with path.open("rb") as file:
        for document in (Document.from_path(path), Document.from_file(file)):
            ref = store.add(document)
            assert (ref["name"], read_all(store, ref)) == ("caf\ufffd.txt", "some text")


def test_a_lone_surrogate_is_an_error_with_its_position_unless_replaced(store):
    text = "ab\ud83dc"
    with pytest.raises(EncodingError, match="character 2"):
        store.add(Document.from_text(text))
    documents = [LangChainDocument(page_content=content) for content in (text + "\ud83d\ude00", "b")]
    ref = store.with_options(replace_undecodable=True).add(documents)
    assert (read_all(store, ref), store.sections(ref)[1].start_char) == ("ab\ufffdc😀\n\nb", 7)


def test_replace_undecodable_of_a_reader_applies_to_all_documents_of_its_store(make_reader):
    reader = make_reader(replace_undecodable=True)
    document = reader.read(b"plain text, and one odd byte: \xff.", "What?").document
    assert read_all(reader.store, document) == "plain text, and one odd byte: \ufffd."
    assert reader.store.add("ab\ud83d")["key"] == reader.store.add("ab\ufffd")["key"]
    with pytest.raises(EncodingError):
        reader.copy(replace_undecodable=False).read("ab\ud83d", "What?")


def test_langchain_documents_keep_their_sources_as_sections(store):
    documents = [
        LangChainDocument(page_content="One.", metadata={"source": "a.pdf", "page": 4, "page_label": "5"}),
        LangChainDocument(page_content="Two é.", metadata={"source": "b.pdf", "page": 0}),
        LangChainDocument(page_content="Three."),
    ]
    ref = store.add(Document.of(documents))
    assert read_all(store, ref) == "One.\n\nTwo é.\n\nThree."
    sections = [SourceMark(0, "a.pdf, page 5"), SourceMark(6, "b.pdf, page 1"), SourceMark(14, "document 3")]
    assert store.sections(ref) == sections
    same_text = store.add(Document.from_text("One.\n\nTwo é.\n\nThree."))
    assert (same_text["key"], store.sections(same_text)) == (ref["key"], [])


async def test_reading_removed_text_is_an_error_until_the_document_is_reattached(store):
    ref = store.add(Document.from_text("some text"))
    store.remove(ref)
    assert not [path for path in store.root.rglob("*") if path.is_file()]
    with pytest.raises(DocumentError, match="pass the document again"):
        store.read(ref, 0, 4)
    with pytest.raises(DocumentMismatchError):
        await store.reattach(ref, Document.from_text("other text"))
    await store.reattach(ref, Document.from_stream(iter(["some ", "text"])))
    assert store.read(ref, 0, 4) == "some"
    with pytest.raises(DocumentError, match="split a character"):
        store.read(store.add(Document.from_text("é")), 0, 1)


def test_labels_are_cut_in_the_middle_and_counted_only_if_they_could_not_be_loaded_again(store, monkeypatch):
    labels = [f"{'é' * 150}, page {number}" for number in range(100_500)]
    ref = store.add(Document.from_pieces(lambda: (Block("x", label, ("\0" * 999, label)) for label in labels)))
    assert [mark.label for mark in store.sections(ref)] == labels
    assert [mark.label[-11:] for mark in store.headings(ref)][100_499:] == ["page 100499"]
    monkeypatch.setattr("memagent_graph.documents.store._MAX_MARKS", 2)
    ref = store.add(Document.from_pieces(lambda: iter([Block("x", number, (number,)) for number in range(3)])))
    assert [mark.label for mark in store.sections(ref)] == ["0", "1"]
    omissions = [(omission["what"], omission["count"]) for omission in ref["omissions"]]
    assert omissions == [("names of sections after the first 2", 1), ("names of headings after the first 2", 1)]
    for path in (store.root / "sections").iterdir():
        path.write_text("[1]")
    with pytest.raises(DocumentError, match="is not a list of sections"):
        store.sections(ref)


@pytest.mark.parametrize("key", ["sha256:../../etc/passwd", "stream:x", "md5:0", "sha256:" + "A" * 64])
def test_a_key_cannot_lead_out_of_the_store(key, store):
    with pytest.raises(DocumentError, match="not a key"):
        store.read({"key": key, "name": "n", "size": 1, "media_type": "text/plain"}, 0, 1)


def test_processes_can_add_the_same_text_concurrently(store):
    text = "many writers " * 50_000
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(store.add, [text] * 4, chunksize=1)
    assert [path.read_text() for path in (store.root / "texts").iterdir()] == [text]
    assert not list(store.root.glob(".incoming-*"))


def test_a_large_utf8_file_is_stored_in_blocks_without_charset_detection(store, tmp_path, monkeypatch):
    """Work on single lines or on the full text would take seconds instead of a fraction of one."""
    path = tmp_path / "large.txt"
    path.write_text("A line of plain prose, as books have it.\n" * 366_000)
    monkeypatch.setattr("memagent_graph.documents.decoding.detect_charset", lambda sample: pytest.fail("guessed"))
    blocks = []
    monkeypatch.setattr("memagent_graph.documents.loaders.Block", lambda text: blocks.append(text) or Block(text))
    ref = store.add(Document.from_path(path))
    assert sum(map(len, blocks)) == ref["size"] == path.stat().st_size
    assert len(blocks) <= path.stat().st_size // (1 << 20) + 2
    assert max(map(len, blocks)) <= 1 << 20


def test_a_named_pipe_is_read_by_its_path(store, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(TEXT.encode("utf-16"),))
    writer.start()
    assert read_all(store, store.add(Document.from_path(tmp_path / "pipe"))) == TEXT
    writer.join()


def test_a_failing_stream_is_an_error_and_stores_no_truncated_document(store):
    def failing_stream():
        yield "some text"
        raise ConnectionError("line cut")

    with pytest.raises(DocumentError, match="line cut"):
        store.add(Document.from_stream(failing_stream()))
    with pytest.raises(EmptyDocumentError):
        store.add(Document.from_stream([" ", ""]))
    for invalid_item in (1, None, b"bytes"):
        with pytest.raises(DocumentError, match="not text or bytes"):
            store.add(Document.from_stream(["text", invalid_item, "text"]))
    assert list((store.root / "texts").iterdir()) == []


FULL_DISK = """
import resource, sys
from memagent_graph.documents import Document, DocumentStore
from memagent_graph.errors import DocumentError

store, text = DocumentStore(sys.argv[1]), "word " * 50_000
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
for source in (text, iter([text])):
    try:
        store.add(Document.of(source))
    except DocumentError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
ref = store.add(Document.of(text))
assert store.read(ref, 0, ref["size"]) == text
"""


def test_a_full_disk_is_an_error_and_leaves_no_truncated_text(tmp_path):
    run = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("too large") == 2, run.stdout
    assert "MEMAGENT_HOME" in run.stdout


@pytest.mark.parametrize(
    "text",
    ["https://example.org/report.pdf", "file:///etc/passwd", "s3://bucket/key", "nosuch.pdf", "a/nosuch.md", "a book"],
)
def test_a_text_that_is_a_url_or_a_file_name_is_refused(text: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a book").write_text("text")
    with pytest.raises(DocumentError, match=r"Document\.from_text"):
        Document.of(text)
    assert Document.from_text(text).content == text


@pytest.mark.parametrize(
    "text", ["See https://example.org for more", "Read report.pdf", "a sentence.", "Node.js", ".md of", "a book.txt"]
)
def test_other_short_texts_are_documents(text: str) -> None:
    assert Document.of(text).content == text
