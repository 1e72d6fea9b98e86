"""File types are recognised by content; `test_made_documents.py` tests the text that each type gives."""

import io
import zipfile

import pytest
from support.document_files import make_pdf, make_zip

from memagent_graph.documents import Document, SourceMark
from memagent_graph.errors import UnsupportedDocumentError

pytestmark = pytest.mark.usefixtures("in_process_conversion")


def add_and_read(store, document):
    ref = store.add(document)
    return store.read(ref, 0, ref["size"]), ref


def test_a_pdf_is_recognised_by_its_content_and_its_pages_are_sections(store, tmp_path):
    data = make_pdf("The first page.", "The second one.", "And the last.")
    (tmp_path / "misnamed.txt").write_bytes(data)
    for source in (tmp_path / "misnamed.txt", data, io.BytesIO(data)):
        text, ref = add_and_read(store, Document.of(source))
        assert text == "The first page.\n\nThe second one.\n\nAnd the last."
        assert ref["media_type"] == "application/pdf"
        assert store.sections(ref) == [SourceMark(0, "page 1"), SourceMark(17, "page 2"), SourceMark(34, "page 3")]


def test_an_archive_with_damaged_content_or_names_is_refused_as_damaged(store):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_LZMA) as file:
        file.writestr("mimetype", "application/epub+zip" * 3)
    data = archive.getvalue()
    start = data.index(b"mimetype") + 8
    inverted = bytes(255 - byte for byte in data[start + 9 : start + 25])
    damaged = data[: start + 9] + inverted + data[start + 25 :]
    misnamed = make_zip({"\u00e9.xml": "text"}).replace("\u00e9".encode(), b"\xff\xff")
    for name, content in (("x.epub", damaged), ("x.docx", misnamed)):
        with pytest.raises(UnsupportedDocumentError, match=f"{name} is a damaged"):
            store.add(Document.from_bytes(content, name=name))


MAIL = b"From: a@example.org\nMIME-Version: 1.0\nContent-Transfer-Encoding: quoted-printable\n\n=C2=A3678\n"
LETTER = b"From: the harbor office\nDate: 3 May\nSubject: keys\n\n=C2=A3678\n"


@pytest.mark.parametrize(
    ("data", "media_type", "text_part"),
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
def test_mail_and_html_without_an_extension_are_recognised(data, media_type, text_part, store, tmp_path, caplog):
    (tmp_path / "saved").write_bytes(data)
    for source in (tmp_path / "saved", data, io.BytesIO(data)):
        text, ref = add_and_read(store, Document.of(source))
        assert ref["media_type"] == media_type
        assert text_part in text
    assert store.add(Document.from_bytes(data, "a.txt"))["media_type"] == "text/plain"
    store.add(Document.of(data.decode("utf-16" if data[0] > 127 else "utf-8")))
    assert caplog.text.count("begins like a file of the kind") == (0 if media_type == "text/plain" else 2)
