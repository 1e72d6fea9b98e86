"""Converts books (.epub): the chapters in reading order, each as a section."""

from __future__ import annotations

from collections import Counter
from typing import Final

from memagent_converters.html_to_markdown import AUDIO_AND_VIDEO, UNDESCRIBED_PICTURES, iter_markdown, list_omissions
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
    items_by_id = {get_attribute(node, "id"): node for node in iter_descendants(package_root, "item")}
    title = next((node.text for node in iter_descendants(package_root, "title") if node.text), None)
    if title:
        yield Block(title.strip() + BLOCK_SEPARATOR)
    for chapter_number, item_reference in enumerate(iter_descendants(package_root, "itemref"), 1):
        chapter_id = get_attribute(item_reference, "idref")
        item = items_by_id.get(chapter_id)
        member = archive.resolve_path(package_path, get_attribute(item, "href") or f"chapter {chapter_id}")
        chapter_content = archive.read(member)
        if not chapter_content:
            yield Omission("chapters that are missing", member, "Get the complete book.")
            continue
        media_type, _, format_name = get_attribute(item, "media-type").partition("/")
        if media_type in {"image", "audio", "video"} and format_name != "svg+xml":
            what = UNDESCRIBED_PICTURES if media_type == "image" else AUDIO_AND_VIDEO
            yield from list_omissions(Counter((what,)), f"chapter {chapter_number}")
            continue
        yield from iter_markdown(decode_web_page(chapter_content), f"chapter {chapter_number}", end=BLOCK_SEPARATOR)
