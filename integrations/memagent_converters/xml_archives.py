"""Reads zip archives of XML (Office, OpenDocument and book files), with bounds and without external entities."""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, Final
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from memagent_converters.equations import FormulaElement, linearize
from memagent_converters.html_to_markdown import parse_int
from memagent_graph.converters import ConversionError, SourceFile

_MAX_MEMBER_BYTES: Final = 1 << 30
_TABLE_GROUPS: Final = frozenset(
    ("sdt", "sdtContent", "ins", "customXml", "table-rows", "table-row-group", "table-header-rows")
)
"""Elements around rows or cells: content controls, insertions, groups of rows and rows repeated on each page."""


class XMLArchive:
    """A zip archive whose members are read as XML.

    Args:
        source: the file.
    """

    def __init__(self, source: SourceFile) -> None:
        self.name = source.name
        self._archive = zipfile.ZipFile(source.file)
        self.names = frozenset(self._archive.namelist())

    def read(self, member: str) -> bytes:
        """Return a member's content; empty if the member does not exist.

        Raises:
            ConversionError: the member is damaged, or too large.
        """
        if member not in self.names:
            return b""
        if self._archive.getinfo(member).file_size > _MAX_MEMBER_BYTES:
            raise ConversionError(f"{member} in {self.name} has more than a gigabyte", "Split the document.")
        return self._archive.read(member)

    def read_xml(self, member: str) -> Element:
        """Return a member's root element; an empty element if the member does not exist, or is not XML.

        Raises:
            ConversionError: the member declares entities, which such files never do.
        """
        data = self.read(member)
        if b"<!ENTITY" in data:
            raise ConversionError(f"{member} in {self.name} declares XML entities", "Save the document again.")
        try:
            return ElementTree.fromstring(data)  # noqa: S314  no entities, and a bounded process
        except ElementTree.ParseError:
            return Element("")

    def read_required_xml(self, member: str) -> Element:
        """Return a member's root element.

        Raises:
            ConversionError: the member does not exist, or is not XML.
        """
        root = self.read_xml(member)
        if not root.tag:
            raise ConversionError(f"{self.name} is damaged: it has no readable {member}", "Save it again.")
        return root

    def read_relationships(self, member: str) -> dict[str, tuple[str, str]]:
        """Return the relationships of an Office member, by id: the type, and the member or address that it names."""
        folder, file_name = posixpath.split(member)
        relationships: dict[str, tuple[str, str]] = {}
        for node in self.read_xml(posixpath.join(folder, "_rels", f"{file_name}.rels")):
            target = node.get("Target", "")
            if node.get("TargetMode") != "External":
                target = self.resolve_path(member, target)
            relationships[node.get("Id", "")] = node.get("Type", "").rpartition("/")[2], target
        return relationships

    def find_member(self, usual_member: str, kind: str = "officeDocument", source: str = "") -> str:
        """Return the member that an Office file or its member `source` names. Some are numbered, as document2.xml."""
        targets = (target for target_kind, target in self.read_relationships(source).values() if target_kind == kind)
        return next((target for target in targets if target in self.names), usual_member)

    @staticmethod
    def resolve_path(member: str, target: str) -> str:
        """Return the member that a relative address in another member names."""
        path = posixpath.join("/", posixpath.dirname(member), unquote(target.partition("#")[0]))
        return posixpath.normpath(path).lstrip("/")


def get_local_name(element: Element) -> str:
    """Return an element's name without its namespace."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def get_attribute(element: Element | None, name: str, default: str = "") -> str:
    """Return an attribute by its name without its namespace."""
    if element is None:
        return default
    return next((value for key, value in element.items() if key.rpartition("}")[2] == name), default)


def find_child(element: Element | None, *path: str) -> Element | None:
    """Return the first element at a path of names without namespaces."""
    for name in path:
        element = next(iter_children(element, name), None)
    return element


def iter_children(element: Element | None, *names: str) -> Iterator[Element]:
    """Yield the children with these names, or all children; nothing if the element is missing."""
    return (node for node in (() if element is None else element) if not names or get_local_name(node) in names)


def iter_descendants(element: Element, *names: str) -> Iterator[Element]:
    """Yield the elements with these names, in document order."""
    return (node for node in element.iter() if get_local_name(node) in names)


def iter_table_parts(parent: Element, name: str) -> Iterator[Element]:
    """Yield the rows of a table or the cells of a row, but not those of tables in its cells."""
    for element in parent:
        if get_local_name(element) == name:
            yield element
        elif get_local_name(element) in _TABLE_GROUPS:
            yield from iter_table_parts(element, name)


def format_formula(element: Element) -> str:
    """Return a formula as a line of HTML."""
    return escape(linearize(_to_formula(element)))


def _to_formula(element: Element) -> FormulaElement:
    name = get_local_name(element)
    text = (element.text or "") if name in {"t", "mi", "mn", "mo", "mtext", "ms"} else get_attribute(element, "val")
    return name, text.strip(), [_to_formula(node) for node in element]


def get_int_attribute(element: Element | None, name: str, default: int) -> int:
    """Return an attribute as a number, by its name without its namespace; the default if it is not a number."""
    return parse_int(get_attribute(element, name), default)


def make_html_table(rows: Sequence[Sequence[Sequence[Any]]]) -> str:
    """Return a table as HTML. A cell is its HTML, and how many columns and rows it spans."""
    return "<table>" + "".join(
        "<tr>"
        + "".join(f'<td colspan="{width}" rowspan="{height}">{html}</td>' for html, width, height in row)
        + "</tr>"
        for row in rows
    ) + "</table>"  # fmt: skip
