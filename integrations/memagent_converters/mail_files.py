"""Converts e-mail with the standard library: a message (.eml, .mhtml) or a mailbox (.mbox).

Of alternative bodies, the plain text is read, unless the HTML has far more words. Attachments are converted as separate
files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from email.message import Message
from email.parser import BytesParser
from email.policy import EmailPolicy
from typing import Any, Final

from memagent_converters.html_to_markdown import render_markdown
from memagent_graph.converters import BLOCK_SEPARATOR, Block, ConversionError, Omission, Parts, SourceFile
from memagent_graph.documents.decoding import decode_web_page, decode_web_text, detect_binary_kind

_HEADERS: Final = ("From", "To", "Cc", "Date", "Subject")
_FROM_LINE: Final = re.compile(rb"From \S+.*\d:\d\d.*\d{4}\s*")
_QUOTED_FROM: Final = re.compile(rb"^>(>*From )", re.MULTILINE)


class _LenientPolicy(EmailPolicy):
    """Returns the text of a damaged header; the standard library fails to parse some of them."""

    def header_fetch_parse(self, name: str, value: str) -> Any:
        try:
            return super().header_fetch_parse(name, value)
        except Exception:  # noqa: BLE001  the library's parser raises many types
            return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


_PARSER: Final = BytesParser(policy=_LenientPolicy())


def convert(source: SourceFile) -> Parts:
    """Convert a message."""
    message = _PARSER.parsebytes(source.read())
    if not message.keys():
        raise _make_misnamed_error(source, "an e-mail but has no headers")
    yield from _convert_message(source, message)


def convert_box(source: SourceFile) -> Parts:
    """Convert a mailbox; each message is a section."""
    for message_number, message_content in enumerate(_iter_messages(source), 1):
        yield Block("", f"message {message_number}")
        yield from _convert_message(source, _PARSER.parsebytes(message_content))
        yield Block(BLOCK_SEPARATOR)


def _iter_messages(source: SourceFile) -> Iterator[bytes]:
    source.file.seek(0)
    lines: list[bytes] = []
    is_blank, has_message = True, False
    for line in source.file:
        if is_blank and _FROM_LINE.fullmatch(line.rstrip(b"\r\n")):
            if has_message:
                yield _QUOTED_FROM.sub(rb"\1", b"".join(lines))
            lines, has_message = [], True
        else:
            lines.append(line)
        is_blank = not line.strip()
    if not has_message:
        raise _make_misnamed_error(source, "a mailbox but has no message")
    yield _QUOTED_FROM.sub(rb"\1", b"".join(lines))


def _make_misnamed_error(source: SourceFile, problem: str) -> ConversionError:
    message = f"{source.name} is named as {problem}"
    return ConversionError(message, "Rename it to .txt to read it as text.", kind="unsupported")


def _convert_message(source: SourceFile, message: Message[Any, Any]) -> Parts:
    """Yield a message's headers, text and attachments."""
    headers = [f"{name}: {_get_header(message, name)}" for name in _HEADERS if name in message]
    subject = _get_header(message, "Subject")
    yield Block("\n".join(headers) + BLOCK_SEPARATOR if headers else "", headings=(subject,) if subject else None)
    yield from _convert_part(source, message)


def _get_header(message: Message[Any, Any], name: str) -> str:
    return " ".join(str(message[name] or "").split())


def _convert_part(source: SourceFile, part: Message[Any, Any]) -> Parts:
    content_type = part.get_content_type()
    if content_type == "message/rfc822":
        payload = part.get_payload()
        if isinstance(payload, list) and payload and isinstance(payload[0], Message):
            yield Block("Forwarded message:\n")
            yield from _convert_message(source, payload[0])
    elif part.is_multipart():
        parts = [subpart for subpart in part.get_payload() if isinstance(subpart, Message)]
        if content_type == "multipart/alternative":
            parts.sort(key=lambda subpart: subpart.get_content_type() != "text/calendar")  # it is no alternative
            invitations = [subpart for subpart in parts[:-1] if subpart.get_content_type() == "text/calendar"]
            plain_part = next((subpart for subpart in parts if subpart.get_content_type() == "text/plain"), None)
            html = "".join(
                _decode_text(subpart) for subpart in parts[-1].walk() if subpart.get_content_type() == "text/html"
            )
            if plain_part is None or len(render_markdown(html).split()) > 3 * len(_decode_text(plain_part).split()):
                parts = parts[-1:] + invitations
            else:
                parts = [plain_part, *_iter_attachments(parts[-1]), *invitations]
        for subpart in parts:
            if content_type.startswith("message/"):  # a report, such as of failed delivery: its fields are headers
                fields = [f"{name}: {' '.join(str(value).split())}" for name, value in subpart.items()]
                yield Block("\n".join(fields) + BLOCK_SEPARATOR)
            yield from _convert_part(source, subpart)
    elif part.get_content_disposition() == "attachment" or not content_type.startswith("text/"):
        yield from _convert_attachment(source, part, content_type)
    elif content_type != "text/css" or part.get_filename():  # not the styles of a saved page, which have no file name
        yield Block(_render_text(part, content_type).strip() + BLOCK_SEPARATOR)


def _iter_attachments(part: Message[Any, Any]) -> Iterator[Message[Any, Any]]:
    """Yield what is attached to the HTML of a message: files, messages, and pictures that its page does not show."""
    payload: Any = part.get_payload()
    for subpart in payload if part.is_multipart() else ():
        kind = subpart.get_content_maintype()
        is_shown_picture = kind == "image" and part.get_content_type() == "multipart/related"
        is_body = kind == "text" and not subpart.get_filename()
        if kind == "multipart":
            yield from _iter_attachments(subpart)
        elif subpart.get_content_disposition() == "attachment" or not (is_shown_picture or is_body):
            yield subpart


def _decode_text(part: Message[Any, Any]) -> str:
    """Return a part's text. If its charset is unknown or wrong, it is decoded as a browser would."""
    payload = part.get_payload(decode=True)
    encoded_text = payload if isinstance(payload, bytes) else b""
    decode = decode_web_page if part.get_content_type() == "text/html" else decode_web_text
    return decode(encoded_text, part.get_content_charset()).replace("\r\n", "\n")


def _render_text(part: Message[Any, Any], content_type: str) -> str:
    return render_markdown(_decode_text(part)) if content_type == "text/html" else _decode_text(part)


def _convert_attachment(source: SourceFile, part: Message[Any, Any], content_type: str) -> Parts:
    name = part.get_filename() or f"{content_type} without a name"
    payload = part.get_payload(decode=True)
    if not isinstance(payload, bytes) or content_type.startswith(
        ("multipart/", "application/pgp-sig", "application/pkcs7-sig")
    ):
        return
    is_document = payload.startswith((b"%PDF-", rb"{\rtf")) or detect_binary_kind(payload[:1024]) is not None
    is_text = name.lower().endswith((".txt", ".md", ".csv", ".log")) and not is_document
    if content_type.startswith("image/") and part.get_content_disposition() != "attachment":
        yield Omission("pictures", name, "Look at them in the message.")
    elif content_type in {"application/pkcs7-mime", "application/pgp-encrypted"}:
        yield Omission("encrypted parts", name, "Save the message decrypted.")
    elif is_text or (content_type.startswith("text/") and content_type != "text/rtf"):
        yield Block(_render_text(part, content_type) + BLOCK_SEPARATOR, f"file {name}")
    else:
        yield from source.convert_embedded(name, payload)
