"""Converters: HTML, PDF and DOCX give readable text, and pages are known."""

import io
import zipfile

import pytest
from support.document_files import docx, pdf

from memagent_graph.documents import Document, SourceMark
from memagent_graph.errors import (
    DocumentError,
    EmptyDocumentError,
    EncodingError,
    UnsupportedDocumentError,
)

pytestmark = pytest.mark.usefixtures("converts_here")
DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"


def read(store, document):
    ref = store.add(document)
    return store.read(ref, 0, ref["size"]), ref


def test_a_pdfs_pages_are_text_with_their_numbers(store, tmp_path):
    path = tmp_path / "paper.pdf"
    path.write_bytes(pdf("The first page.", "The second one.", "And the last."))
    text, ref = read(store, Document.from_path(path))
    assert text == "The first page.\n\nThe second one.\n\nAnd the last."
    assert ref["media_type"] == "application/pdf"
    assert store.sections(ref) == [SourceMark(0, "page 1"), SourceMark(17, "page 2"), SourceMark(34, "page 3")]


def test_a_pdf_is_known_by_its_content_whatever_its_source(store, tmp_path):
    data = pdf("Some text.")
    (tmp_path / "misnamed.txt").write_bytes(data)
    for source in (tmp_path / "misnamed.txt", data, io.BytesIO(data)):
        text, _ = read(store, Document.of(source))
        assert text == "Some text."


def test_a_pdf_without_text_or_beyond_repair_says_so(store):
    with pytest.raises(EmptyDocumentError, match="holds no text"):
        store.add(Document.from_bytes(pdf("", "")))
    with pytest.raises(DocumentError, match="cannot be opened"):
        store.add(Document.from_bytes(b"%PDF-1.4\nbroken"))
    with pytest.raises(UnsupportedDocumentError, match="damaged PDF file, or not one"):
        store.add(Document.from_bytes(b"plain text", name="x.pdf"))


def test_a_docx_file_is_its_paragraphs(store, tmp_path):
    path = tmp_path / "letter.docx"
    path.write_bytes(docx("Dear reader,", "naïve café &amp; 日本語"))
    text, ref = read(store, Document.from_path(path))
    assert text == "Dear reader,\n\nnaïve café & 日本語\n"
    assert ref["media_type"] == DOCX
    assert read(store, Document.of(path.read_bytes()))[0] == text
    with pytest.raises(EncodingError, match="no charset 'utf-9'"):
        store.add(Document.from_path(path, encoding="utf-9"))


def test_a_damaged_docx_file_or_another_zip_is_refused(store):
    with pytest.raises(UnsupportedDocumentError, match="damaged DOCX"):
        store.add(Document.from_bytes(docx("x")[:-40], name="x.docx"))
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.txt", "text\xff" * 10)
    with pytest.raises(UnsupportedDocumentError, match="zip"):
        store.add(Document.from_bytes(archive.getvalue()))


def test_an_archive_is_called_damaged_whatever_is_damaged_in_it(store):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_LZMA) as file:
        file.writestr("mimetype", "application/epub+zip" * 3)
    packed = archive.getvalue()
    start = packed.index(b"mimetype") + 8
    damaged = packed[: start + 9] + bytes(255 - byte for byte in packed[start + 9 : start + 25]) + packed[start + 25 :]
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("\u00e9.xml", "text")
    misnamed = archive.getvalue().replace("\u00e9".encode(), b"\xff\xff")
    for name, content in (("x.epub", damaged), ("x.docx", misnamed)):
        with pytest.raises(UnsupportedDocumentError, match=f"{name} is a damaged"):
            store.add(Document.from_bytes(content, name=name))


PAGE = """<!doctype html><html><head><meta charset="{charset}"><title>A title</title><style>p {{}}</style>
<script>var hidden = 1;</script></head><body><h1>Überschrift</h1><p>One <b>bold</b> word, 2 * 3 and snake_case.</p>
<!-- comment --><ul><li>first</li><li>second</li></ul><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr>
</table></body></html>"""


@pytest.mark.parametrize("charset", ["utf-8", "iso-8859-1", "cp1252"])
def test_html_becomes_markdown_in_its_declared_charset(charset, store, tmp_path):
    path = tmp_path / "page.html"
    path.write_bytes(PAGE.format(charset=charset).encode(charset))
    text, ref = read(store, Document.from_path(path))
    assert ref["media_type"] == "text/html"
    assert "# Überschrift" in text
    assert "One **bold** word, 2 * 3 and snake_case." in text
    assert "- first\n- second" in text
    assert "| 1 | 2 |" in text
    assert "A title" in text
    for unread in ("hidden", "comment", "{}", "<"):
        assert unread not in text


@pytest.mark.parametrize("charset", ["nonsense", "punycode", "idna", "unicode_escape", "utf-7", "utf-16", "base64"])
def test_a_charset_that_no_browser_knows_is_not_taken_from_a_file(charset, store):
    page = PAGE.format(charset=charset).encode() + b"<p>abc-zzzz9zzzz9 +AGE- \\u0041"
    assert "abc-zzzz9zzzz9 +AGE- \\u0041" in read(store, Document.from_bytes(page, name="x.html"))[0]


MAIL = b"From: a@example.org\nMIME-Version: 1.0\nContent-Transfer-Encoding: quoted-printable\n\n=C2=A3678\n"
LETTER = b"From: the harbor office\nDate: 3 May\nSubject: keys\n\n=C2=A3678\n"


@pytest.mark.parametrize(
    ("data", "kind", "piece"),
    [
        (MAIL, "message/rfc822", "\n\n£678"),
        (b"Received: by x;\n\tMon\n" * 900 + MAIL.replace(b"\n", b"\r\n"), "message/rfc822", "\n\n£678"),
        (b"From ada Mon Jan  5 10:00:00 2026\n" + MAIL, "application/mbox", "\n\n£678"),
        (b"\n<!-- saved --><!DOCTYPE html>\n<p>&pound;678", "text/html", "£678\n"),
        ("<html><p>&pound;678".encode("utf-16"), "text/html", "£678\n"),
        (LETTER, "text/plain", LETTER.decode()),
        (b"From 1914 to 1918\nSource: a book", "text/plain", "From 1914 to 1918\nSource: a book"),
        (b"<html><?php echo 678 ?>", "text/plain", "<?php echo 678 ?>"),
        (b"<!---->" * 9000, "text/plain", "<!---->"),
    ],
)
def test_mail_and_pages_without_a_telling_name_are_known_by_their_content(data, kind, piece, store, tmp_path, caplog):
    (tmp_path / "saved").write_bytes(data)
    for source in (tmp_path / "saved", data, io.BytesIO(data)):
        text, ref = read(store, Document.of(source))
        assert ref["media_type"] == kind
        assert piece in text
    assert store.add(Document.from_bytes(data, "a.txt"))["media_type"] == "text/plain"
    store.add(Document.of(data.decode("utf-16" if data[0] > 127 else "utf-8")))
    assert caplog.text.count("begins like a file of the kind") == (0 if kind == "text/plain" else 2)


def test_html_errors_are_document_errors(store):
    with pytest.raises(EmptyDocumentError):
        store.add(Document.from_bytes(b"<html><script>x</script></html>", name="x.html"))
    assert read(store, Document.from_bytes(b"<div>" * 5000 + b"x", name="x.html"))[0] == "x\n"


def test_markdown_and_html_in_a_text_file_stay_as_they_are(store, tmp_path):
    for name in ("a.md", "a.txt", "a.py"):
        (tmp_path / name).write_text("# Title\n\n<p>as it *is*</p>\n")
        assert read(store, Document.from_path(tmp_path / name))[0] == "# Title\n\n<p>as it *is*</p>\n"


def test_a_page_that_cannot_be_read_is_named(store):
    data = pdf("The first page.", "The second one.")
    kids = b"/Kids [4 0 R 6 0 R]"
    assert kids in data
    with pytest.raises(DocumentError, match=r"page 2 of the PDF file .* cannot be read.*qpdf"):
        store.add(Document.from_bytes(data.replace(kids, b"/Kids [4 0 R 9 0 R]")))


def test_html_with_damaged_marks_is_read_as_browsers_read_it(store):
    text, _ = read(store, Document.from_bytes(b"<p>before</p><![ if x><p>after</p>", name="odd.html"))
    assert text == "before\n\nafter\n"
