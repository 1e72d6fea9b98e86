"""Books (.epub): the chapters in reading order, each a section."""

from __future__ import annotations

from typing import Final

from memagent_converters.html_to_markdown import blocks
from memagent_converters.xml_archives import XmlArchive, attribute, descendants
from memagent_graph.converters import GAP, Block, ConversionError, Omission, Parts, SourceFile
from memagent_graph.documents.charsets import web_text

_FONTS: Final = frozenset(("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC"))
"""Encryptions that hide only a book's fonts."""


def convert(source: SourceFile) -> Parts:
    """Convert a book.

    Raises:
        ConversionError: it is encrypted, or damaged.
    """
    archive = XmlArchive(source.name, source.file)
    encryption = archive.xml("META-INF/encryption.xml")
    methods = descendants(encryption, "EncryptionMethod") if encryption is not None else ()
    if any(attribute(each, "Algorithm") not in _FONTS for each in methods):
        raise ConversionError(
            f"the book {source.name} is encrypted", "Only the shop's own reader can open it.", kind="unsupported"
        )
    container = archive.required("META-INF/container.xml")
    package = next((attribute(each, "full-path") for each in descendants(container, "rootfile")), "")
    root = archive.required(package)
    items = {attribute(each, "id"): attribute(each, "href") for each in descendants(root, "item")}
    title = next((each.text for each in descendants(root, "title") if each.text), None)
    if title:
        yield Block(title.strip() + GAP)
    for number, entry in enumerate(descendants(root, "itemref"), 1):
        member = archive.path_from(package, items.get(attribute(entry, "idref"), ""))
        data = archive.read(member)
        if not data:
            yield Omission("chapters that are missing", member, "Get the whole book.")
            continue
        yield from blocks(web_text(data, None), f"chapter {number}", end=GAP)
