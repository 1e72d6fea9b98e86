"""Converts books (.epub): the chapters in reading order, each as a section."""

from __future__ import annotations

from typing import Final

from memagent_converters.html_to_markdown import iter_markdown
from memagent_converters.xml_archives import XMLArchive, get_attribute, iter_descendants
from memagent_graph.converters import BLOCK_SEPARATOR, Block, ConversionError, Omission, Parts, SourceFile
from memagent_graph.documents.decoding import decode_web_page

_FONT_ENCRYPTIONS: Final = frozenset(("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC"))
"""Algorithms that encrypt only the fonts of a book."""


def convert(source: SourceFile) -> Parts:
    """Convert a book.

    Raises:
        ConversionError: the book is encrypted, or damaged.
    """
    archive = XMLArchive(source)
    encryption = archive.read_xml("META-INF/encryption.xml")
    encryption_methods = iter_descendants(encryption, "EncryptionMethod")
    if any(get_attribute(node, "Algorithm") not in _FONT_ENCRYPTIONS for node in encryption_methods):
        raise ConversionError(
            f"the book {source.name} is encrypted", "Only the shop's own reader can open it.", kind="unsupported"
        )
    container = archive.read_required_xml("META-INF/container.xml")
    package_paths = (get_attribute(node, "full-path") for node in iter_descendants(container, "rootfile"))
    package_path = next(filter(None, package_paths), "package document (.opf)")
    package_root = archive.read_required_xml(package_path)
    hrefs_by_id = {
        get_attribute(node, "id"): get_attribute(node, "href") for node in iter_descendants(package_root, "item")
    }
    title = next((node.text for node in iter_descendants(package_root, "title") if node.text), None)
    if title:
        yield Block(title.strip() + BLOCK_SEPARATOR)
    for chapter_number, item_reference in enumerate(iter_descendants(package_root, "itemref"), 1):
        chapter_id = get_attribute(item_reference, "idref")
        member = archive.resolve_path(package_path, hrefs_by_id.get(chapter_id) or f"chapter {chapter_id}")
        chapter_content = archive.read(member)
        if not chapter_content:
            yield Omission("chapters that are missing", member, "Get the complete book.")
            continue
        yield from iter_markdown(decode_web_page(chapter_content), f"chapter {chapter_number}", end=BLOCK_SEPARATOR)
