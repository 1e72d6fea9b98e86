"""Books (.epub): the chapters in reading order, each a section."""

from __future__ import annotations

from typing import Final

from memagent_converters.html_to_markdown import iter_markdown
from memagent_converters.xml_archives import XmlArchive, get_attribute, iter_descendants
from memagent_graph.converters import GAP, Block, ConversionError, Omission, Parts, SourceFile
from memagent_graph.documents.charsets import decode_web_text

_FONTS: Final = frozenset(("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC"))
"""Encryptions that hide only a book's fonts."""


def convert(source: SourceFile) -> Parts:
    """Convert a book.

    Raises:
        ConversionError: the book is encrypted, or damaged.
    """
    archive = XmlArchive(source.name, source.file)
    encryption = archive.read_xml("META-INF/encryption.xml")
    methods = iter_descendants(encryption, "EncryptionMethod") if encryption is not None else ()
    if any(get_attribute(node, "Algorithm") not in _FONTS for node in methods):
        raise ConversionError(
            f"the book {source.name} is encrypted", "Only the shop's own reader can open it.", kind="unsupported"
        )
    container = archive.read_required_xml("META-INF/container.xml")
    package = next((get_attribute(node, "full-path") for node in iter_descendants(container, "rootfile")), "")
    root = archive.read_required_xml(package)
    items = {get_attribute(node, "id"): get_attribute(node, "href") for node in iter_descendants(root, "item")}
    title = next((node.text for node in iter_descendants(root, "title") if node.text), None)
    if title:
        yield Block(title.strip() + GAP)
    for number, entry in enumerate(iter_descendants(root, "itemref"), 1):
        member = archive.resolve_path(package, items.get(get_attribute(entry, "idref"), ""))
        data = archive.read(member)
        if not data:
            yield Omission("chapters that are missing", member, "Get the whole book.")
            continue
        yield from iter_markdown(decode_web_text(data, None), f"chapter {number}", end=GAP)
