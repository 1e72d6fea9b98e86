"""Small files made by hand, in formats that are converted."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence

_IMAGE = zlib.compress(b"\x80" * 64)


def make_raw_pdf(
    contents: Sequence[str], *, annotations: str = "", objects: str = "", root: str = "", resources: str = ""
) -> bytes:
    """Return a PDF of pages with these content streams; numbers of other `objects` start at 50."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(contents)))
    image = 4 + 2 * len(contents)
    bodies: dict[int, bytes] = {
        2: f"<< /Type /Pages /Kids [{kids}] /Count {len(contents)} >>".encode(),
        3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        image: b"<< /Type /XObject /Subtype /Image /Width 8 /Height 8 /ColorSpace /DeviceGray /BitsPerComponent 8 "
        b"/Filter /FlateDecode /Length %d >>\nstream\n%s\nendstream" % (len(_IMAGE), _IMAGE),
        1: f"<< /Type /Catalog /Pages 2 0 R {root} >>".encode(),
    }
    for number, content in enumerate(contents):
        bodies[4 + 2 * number] = (
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R {annotations} "
            f"/Resources << /Font << /F1 3 0 R {resources} >> /XObject << /I {image} 0 R >> >> >>"
        ).encode()
        stream = content.encode("latin-1")
        bodies[5 + 2 * number] = b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream)
    for pdf_object in filter(None, objects.split("\n\n")):
        object_number, _, body = pdf_object.partition(":")
        bodies[int(object_number)] = body.encode("latin-1")
    data, offsets = b"%PDF-1.7\n", {}
    for number, body in sorted(bodies.items()):
        offsets[number] = len(data)
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = "".join(f"{n} 1\n{offset:010d} 00000 n \n" for n, offset in offsets.items())
    xref_offset = len(data)
    data += f"xref\n0 1\n0000000000 65535 f \n{table}".encode()
    return data + f"trailer << /Size {max(offsets) + 1} /Root 1 0 R >>\nstartxref\n{xref_offset}\n%%EOF".encode()


def format_pdf_line(text: str) -> str:
    """Return the PDF operators that show a line of text."""
    return f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"


def make_pdf(*pages: str) -> bytes:
    """Return a PDF with one line of text per page."""
    return make_raw_pdf([format_pdf_line(text) for text in pages])


def make_zip(parts: Mapping[str, str | bytes]) -> bytes:
    """Return a zip archive of these files."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return file.getvalue()


def make_docx(*paragraphs: str) -> bytes:
    """Return a DOCX file of these paragraphs."""
    body = "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in paragraphs)
    parts = {
        "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        '<Override PartName="/word/document.xml" ContentType="application/vnd.openxmlformats-officedocument.'
        'wordprocessingml.document.main+xml"/></Types>',
        "_rels/.rels": '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        '<Relationship Id="r1" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/'
        'officeDocument" Target="word/document.xml"/></Relationships>',
        "word/document.xml": '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'
        f"<w:body>{body}</w:body></w:document>",
    }
    return make_zip(parts)
