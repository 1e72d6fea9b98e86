"""Converts HTML to Markdown, including cell spans, superscripts, list numbers and form values.

The parser is Lexbor, which follows the HTML standard. The tree is walked without recursion, so any nesting can be read.
Other converters produce HTML, so that they share this converter's tables and lists.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final

from memagent_converters.equations import format_script, linearize
from memagent_graph.converters import Block, Omission, Parts, SourceFile
from memagent_graph.documents.decoding import decode_web_page

_SKIPPED_TAGS: Final = frozenset(
    ("script", "style", "noscript", "template", "iframe", "object", "audio", "video", "canvas", "rp", "datalist")
)
UNDESCRIBED_PICTURES: Final = "pictures without a description"
AUDIO_AND_VIDEO: Final = "audio and video"
_OMITTED_CONTENT: Final = {
    "img": UNDESCRIBED_PICTURES, "iframe": "frames", "frame": "frames", "object": "embedded objects",
    "embed": "embedded objects", "audio": AUDIO_AND_VIDEO, "video": AUDIO_AND_VIDEO,
    "canvas": "canvases drawn by scripts"
}  # fmt: skip
"""Names in omission reports for elements that show something other than text."""
_TRACKING_WIDTHS: Final = frozenset(("0", "1", "0px", "1px"))
"""The widths of tracking pixels, which show nothing."""
_PARAGRAPH_TAGS: Final = frozenset(
    ("p", "div", "section", "article", "aside", "main", "nav", "header", "footer", "address", "figure", "figcaption",
     "form", "fieldset", "legend", "dl", "dt", "title", "body", "details", "summary", "center", "hgroup", "search")
)  # fmt: skip
_HEADING_PREFIXES: Final = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_INLINE_MARKS: Final = {
    "b": "**", "strong": "**", "i": "*", "em": "*", "s": "~~", "del": "~~", "strike": "~~", "code": "`", "kbd": "`",
    "samp": "`", "tt": "`",
}  # fmt: skip
_FORMATTED_TAGS: Final = frozenset(
    (*_HEADING_PREFIXES, *_INLINE_MARKS, "sup", "sub", "a", "li", "ul", "ol", "blockquote", "pre", "table", "caption",
     "tr", "td", "th", "select", "textarea", "rt", "q", "dd")
)  # fmt: skip
"""Elements that add Markdown to their text. The text of other elements is added to their parent unchanged."""
_INPUTS_WITHOUT_TEXT: Final = frozenset(("hidden", "password", "submit", "button", "reset", "image", "file"))
_WHITE_SPACE: Final = re.compile(r"[ \t\n\r\f]+")
_ORDINAL_SUFFIX: Final = re.compile(r"st|nd|rd|th|er|re|e|è|ème|o|a|os|as|TM|SM|®|™|\s*", re.IGNORECASE)
_MAX_COLUMNS: Final = 1000
_TABLE_PARTS: Final = frozenset(("table", "tr"))
"""Elements that contain cells, but no text of their own."""
_MAX_DEPTH: Final = 200
"""Elements that are nested more deeply become plain text, because each level copies and indents all text inside it."""
MAX_REPEATED_LENGTH: Final = 200
"""Maximum characters of a cell whose text is repeated in each row and column that the cell spans."""
_HEADING_START: Final = "\x02"
"""Marks the beginning of a heading while the Markdown is built."""
_MARKED_HEADING: Final = re.compile(rf"{_HEADING_START}(#{{1,6}}) ([^\n]*)")
_PICTURE_TAG: Final = re.compile(r"<(?:img|image)\b", re.IGNORECASE)
_INLINE_MARKDOWN: Final = re.compile(r"[*`~]+|\[\^\w+\]|\]\([^)]*\)|!?\[")
"""Markdown syntax in a heading's text."""

_CLASS_SELECTOR: Final = re.compile(r"\.([\w-]+)\s*(?:,|$)")
_SUB_SUP_STYLE: Final = re.compile(r"vertical-align\s*:\s*(super|sub)\b", re.IGNORECASE)

_NOTE_ROLES: Final = frozenset(("noteref", "doc-noteref"))

Piece = str | int
"""A text, or the number of newlines before the next text."""


class _Verbatim(str):
    """Text whose white space is preserved."""

    __slots__ = ()


@dataclass
class _OpenElement:
    """An open element, and its content so far."""

    tag: str
    attributes: Mapping[str, str | None]
    pieces: list[Piece] = field(default_factory=list)
    rows: list[list[_Cell]] = field(default_factory=list)
    """The rows of a table."""
    cells: list[_Cell] = field(default_factory=list)
    """The cells of a row."""
    item_number: int = 0
    """The number of a list's last item."""


@dataclass
class _Cell:
    text: str
    columns: int = 1
    rows: int = 1


def convert(source: SourceFile) -> Parts:
    """Convert an HTML file, which is UTF-8, or one in another file."""
    data = source.read()
    yield from iter_markdown(decode_web_page(data) if source.depth else data.decode("utf-8", "surrogatepass"))


def iter_markdown(html: str, label: str | None = None, *, end: str = "\n") -> Parts:
    """Yield HTML as Markdown, one block for each heading with the text below it, then the omissions.

    Args:
        html: the page.
        label: the label of the page or chapter, if it is part of a document.
        end: text to append.
    """
    omission_counts: Counter[str] = Counter()
    text = _render(html, omission_counts) + end
    if not text.strip() and not omission_counts:  # pictures marked as decoration are the only content
        omission_counts[UNDESCRIBED_PICTURES] += len(_PICTURE_TAG.findall(html))
    heading_matches = list(_MARKED_HEADING.finditer(text))
    if not heading_matches or heading_matches[0].start() or label is not None:
        yield Block(text[: heading_matches[0].start() if heading_matches else None].replace(_HEADING_START, ""), label)
    heading_path: list[tuple[int, str]] = []
    for match, next_match in zip_longest(heading_matches, heading_matches[1:]):
        level = len(match[1])
        heading_path = [entry for entry in heading_path if entry[0] < level] + [
            (level, _INLINE_MARKDOWN.sub("", match[2]).strip())
        ]
        section = text[match.start() : next_match.start() if next_match else None].replace(_HEADING_START, "")
        yield Block(section, headings=tuple(title for _, title in heading_path))
    yield from list_omissions(omission_counts, label or "")


def list_omissions(omission_counts: Counter[str], location: str = "") -> Iterator[Omission]:
    """Yield an omission for each kind of content that was left out of a document or of a part of it."""
    for kind, count in (+omission_counts).items():
        yield Omission(kind, location, "Look at these places in the document itself, or name a converter.", count)


def render_markdown(html: str) -> str:
    """Return HTML as Markdown, as one text."""
    return _render(html, Counter()).replace(_HEADING_START, "")


def _render(html: str, omission_counts: Counter[str]) -> str:
    """Return HTML as Markdown with `_HEADING_START` before each heading, and count omitted elements."""
    tree = _parse_html(html)
    if "<math" in html:  # some pages repeat each formula for browsers without MathML
        for node in tree.css(".katex-html, .mwe-math-element > img"):
            node.decompose()
    sub_sup_classes = _find_sub_sup_classes(tree) if "vertical-align" in html else None
    open_elements = [_OpenElement("", {})]
    pre_depth = excess_depth = 0
    for node, is_end in _iter_nodes(tree.root):
        element = open_elements[-1]
        tag = node.tag
        if tag == "span" and sub_sup_classes is not None:
            tag = _find_sub_sup_tag(node.attributes, sub_sup_classes)
        if tag == "-text":
            text = (node.text_content or "").replace("\xad", "")
            element.pieces.append(_Verbatim(text) if pre_depth else _WHITE_SPACE.sub(" ", text))
        elif tag in _FORMATTED_TAGS and (
            excess_depth or (len(open_elements) > _MAX_DEPTH and not is_end and element.tag not in _TABLE_PARTS)
        ):
            excess_depth += -1 if is_end else 1
            element.pieces.append(2)
        elif tag in _FORMATTED_TAGS:
            pre_depth += (-1 if is_end else 1) * (tag == "pre")
            if not is_end:
                open_elements.append(
                    _OpenElement(tag, node.attributes, item_number=_get_number_before_list(node) if tag == "ol" else 0)
                )
            else:
                open_elements.pop()
                _close_element(element, open_elements, node)
        elif not is_end or tag in _PARAGRAPH_TAGS:
            _add_element(element, tag, node)
            is_shown = node.attributes.get("width") not in _TRACKING_WIDTHS
            if not is_end and tag in _OMITTED_CONTENT and is_shown and "alt" not in node.attributes:  # "" is decoration
                omission_counts[_OMITTED_CONTENT[tag]] += 1
    return _join_pieces(open_elements[0].pieces)


def _parse_html(html: str) -> Any:
    """Parse a page. The time is quadratic in depth and attributes; the time limit of the conversion bounds it."""
    from selectolax.lexbor import LexborHTMLParser, SelectolaxError  # noqa: PLC0415  the extra `files`

    # The parser does not accept lone surrogates.
    text = html.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    try:
        return LexborHTMLParser(text)
    except SelectolaxError as error:
        raise MemoryError from error  # any text is valid HTML, so only memory can run out


def _find_sub_sup_classes(tree: Any) -> dict[str, str]:
    """Return the classes for superscripts and subscripts in the page's style sheets, with the tag: sup or sub."""
    rules = (rule.partition("{") for style in tree.css("style") for rule in style.text().split("}"))
    return {
        name: match[1][:3]
        for names, _, rule in rules
        if (match := _SUB_SUP_STYLE.search(rule))
        for name in _CLASS_SELECTOR.findall(names)
    }


def _find_sub_sup_tag(attributes: Mapping[str, str | None], tags: Mapping[str, str]) -> str:
    """Return the tag for the style of a span: sup, sub or span."""
    if match := _SUB_SUP_STYLE.search(attributes.get("style") or ""):
        return match[1][:3]
    return next((tags[name] for name in (attributes.get("class") or "").split() if name in tags), "span")


def _iter_nodes(root: Any) -> Iterator[tuple[Any, bool]]:
    """Yield every node at its beginning (False), and every element at its end (True), in document order."""
    node, is_visited = root, False
    while node is not None:
        is_skipped = node.tag in _SKIPPED_TAGS or node.tag == "math"
        if not is_visited:
            yield node, False
            if not is_skipped and (child := node.child) is not None:
                node = child
                continue
        if node.tag[0] not in "-_!":
            yield node, True
        if node.mem_id == root.mem_id:  # comparing nodes would compare their whole HTML
            return
        next_node = node.next
        node, is_visited = (next_node, False) if next_node is not None else (node.parent, True)


def _add_element(parent: _OpenElement, tag: str, node: Any) -> None:
    """Add the text of an element that is not in `_FORMATTED_TAGS` to its open parent."""
    pieces = parent.pieces
    match tag:
        case "br":
            pieces.append(1)
        case "hr":
            pieces += [2, "---", 2]
        case "img" | "area":
            if alt := (node.attributes.get("alt") or "").strip():
                pieces.append(f"![{_WHITE_SPACE.sub(' ', alt)}]")
        case "input":
            pieces.append(_format_input(node.attributes))
        case "option":
            pieces.append(1)
        case "math":
            pieces.append(linearize(_parse_formula(node)))
        case _ if tag in _PARAGRAPH_TAGS:
            pieces.append(2)


def _format_input(attributes: Mapping[str, str | None]) -> str:
    kind = (attributes.get("type") or "text").lower()
    if kind in {"checkbox", "radio"}:
        return "☒ " if "checked" in attributes else "☐ "
    return "" if kind in _INPUTS_WITHOUT_TEXT else f" {attributes.get('value') or ''} "


def _parse_formula(node: Any) -> tuple[str, str, list[Any]]:
    """Return a formula in the form that `linearize` takes: tag, text, children."""
    children, child = [], node.child
    while child is not None:
        if child.tag[0] not in "-_!":
            children.append(_parse_formula(child))
        child = child.next
    return node.tag, "" if children else (node.text() or "").strip(), children


def _get_number_before_list(node: Any) -> int:
    """Return the number before the first number of a list."""
    if "reversed" not in node.attributes:
        return parse_int(node.attributes.get("start"), 1) - 1
    return parse_int(node.attributes.get("start"), sum(child.tag == "li" for child in node.iter())) + 1


def parse_int(text: str | None, default: int) -> int:
    """Return a number of up to nine digits; the default for another text."""
    return int(text) if text and re.fullmatch(r"\s*-?\d{1,9}\s*", text) else default


def _close_element(  # noqa: PLR0912  one case for each element
    element: _OpenElement, open_elements: list[_OpenElement], node: Any
) -> None:
    """Add the text of a finished element to its parent."""
    parent, tag = open_elements[-1], element.tag
    pieces = parent.pieces
    match tag:
        case "tr":
            table = next((outer for outer in reversed(open_elements) if outer.tag == "table"), parent)
            table.rows.append(element.cells)
        case "td" | "th":
            row = next((outer for outer in reversed(open_elements) if outer.tag in {"tr", "table"}), parent)
            spans = [max(1, parse_int(element.attributes.get(name), 1)) for name in ("colspan", "rowspan")]
            if element.attributes.get("rowspan") == "0":
                spans[1] = 1 << 16
            row.cells.append(_Cell(_join_pieces(element.pieces), min(spans[0], _MAX_COLUMNS), spans[1]))
        case "table":
            caption = [2, element.pieces[0], 2] if element.pieces else []
            pieces += [*caption, 2, _Verbatim(format_table(element.rows)), 2]
        case "caption":
            pieces.insert(0, _join_pieces(element.pieces))
        case "pre":
            lines = "".join("\n" if isinstance(piece, int) else piece for piece in element.pieces).strip("\n")
            pieces += [2, _Verbatim(f"```\n{lines}\n```"), 2]
        case "ul" | "ol":
            is_nested = any(outer.tag == "li" for outer in open_elements)
            pieces += [1 if is_nested else 2, _Verbatim(_join_pieces(element.pieces)), 1 if is_nested else 2]
        case "li":
            pieces += [1, _Verbatim(_format_item(element, parent)), 1]
        case "blockquote" | "dd":
            content = _join_pieces(element.pieces)
            mark = "> " if tag == "blockquote" else "  "
            pieces += (
                [2, _Verbatim("\n".join((mark + line).rstrip() for line in content.split("\n"))), 2] if content else [2]
            )
        case "select":
            pieces.append(f" {_format_selection(node)} ")
        case "textarea":
            pieces += [1, _Verbatim((node.text() or "").strip()), 1]
        case _ if tag in _HEADING_PREFIXES:
            if content := " ".join(_join_pieces(element.pieces).split()):
                pieces += [2, _HEADING_START + _HEADING_PREFIXES[tag] + content.replace(_HEADING_START, ""), 2]
        case _:
            _close_inline_element(element, parent)


def _close_inline_element(element: _OpenElement, parent: _OpenElement) -> None:
    pieces, tag = parent.pieces, element.tag
    if any(isinstance(piece, int) or (isinstance(piece, _Verbatim) and "\n" in piece) for piece in element.pieces):
        pieces += element.pieces  # it contains blocks
        return
    raw_text = "".join(map(str, element.pieces))
    content = raw_text.strip()
    leading_space = raw_text[: len(raw_text) - len(raw_text.lstrip())]
    trailing_space = raw_text[len(raw_text.rstrip()) :] if content else ""
    match tag:
        case "sup" if content and not _ORDINAL_SUFFIX.fullmatch(content):
            note_match = re.fullmatch(r"\[{0,2}\(?([^\[\]]{1,6}?)\)?\]{0,2}\(#.*\)", content)
            text = content if content.startswith("[^") else format_script("^", content)
            if note_match:
                text = f"[^{note_match[1]}]"
        case "sub" if content:
            text = format_script("_", content)
        case "a" if content and _NOTE_ROLES & {element.attributes.get("epub:type"), element.attributes.get("role")}:
            text = f"[^{content.strip('[]^')}]"
        case "a" if content and (target := (element.attributes.get("href") or "").strip()):
            text = content if target == content else f"[{content}]({target})"
        case "rt" if content:
            text = f"({content})"
        case "q" if content:
            text = f"“{content}”"
        case _ if tag in _INLINE_MARKS and content:
            text = f"{_INLINE_MARKS[tag]}{content}{_INLINE_MARKS[tag]}"
        case _:
            text = content
    pieces += [leading_space, _Verbatim(text), trailing_space] if text else [raw_text]


def _format_selection(node: Any) -> str:
    """Return the selected options, or the option that a browser shows by default."""
    options = node.css("option")
    selection = [option for option in options if "selected" in option.attributes]
    selection = selection or ([] if "multiple" in node.attributes else options[:1])
    return ", ".join((option.text() or "").strip() for option in selection)


def _format_item(element: _OpenElement, parent: _OpenElement) -> str:
    """Return a list item with its number, or with the marker that another converter has set."""
    indent = "  " * min(parse_int(element.attributes.get("level"), 0), 20)
    marker = element.attributes.get("marker") or "-"
    if parent.tag == "ol":
        increment = -1 if "reversed" in parent.attributes else 1
        parent.item_number = parse_int(element.attributes.get("value"), parent.item_number + increment)
        style = parent.attributes.get("type") or "1"
        marker = f"{format_number(parent.item_number, NUMBER_STYLES.get(style, 'decimal'))}."
    lines = _join_pieces(element.pieces).split("\n")
    continuation_lines = [f"{indent}{' ' * (len(marker) + 1)}{line}".rstrip() for line in lines[1:]]
    return "\n".join([f"{indent}{marker} {lines[0]}".rstrip(), *continuation_lines])


NUMBER_STYLES: Final = {"a": "lowerLetter", "A": "upperLetter", "i": "lowerRoman", "I": "upperRoman"}
"""Word's name of a numbering style, by the `type` of an HTML list."""


def format_number(number: int, style: str) -> str:
    """Return a number as lists and headings show it.

    Args:
        number: the number; Roman numerals and letters start at 1, others become decimals.
        style: Word's name: decimal, decimalZero, lowerLetter, upperLetter, lowerRoman, upperRoman.
    """
    if style.endswith("Roman") and 0 < number < 4000:
        numerals = zip((1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1),
                    ("M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"), strict=True)  # fmt: skip
        text = ""
        for value, letters in numerals:
            text += letters * (number // value)
            number %= value
    elif style.endswith("Letter") and 0 < number < 1000:
        text = chr(65 + (number - 1) % 26) * ((number - 1) // 26 + 1)
    else:
        return f"{number:02d}" if style == "decimalZero" else str(number)
    return text.lower() if style.startswith("lower") else text


def format_table(rows: list[list[_Cell]]) -> str:
    """Return a table as Markdown. If it is only page layout, return its cells one after the other.

    A cell that spans rows or columns is repeated in each of them, unless it is long.
    """
    cells = [cell for row in rows for cell in row]
    if any("\n| --- " in cell.text for cell in cells) or len(rows) < 2:
        if len(rows) == 1 and len(cells) > 1 and all("\n" not in cell.text for cell in cells):
            return " | ".join(cell.text.replace(_HEADING_START, "") for cell in cells)
        return "\n\n".join(cell.text for cell in cells if cell.text)
    text_rows = list(_iter_text_rows(rows))
    width = max(map(len, text_rows), default=0)
    lines = ["| " + " | ".join([*row, *[""] * (width - len(row))]) + " |" for row in text_rows]
    return "\n".join([*lines[:1], "| " + " | ".join(["---"] * width) + " |", *lines[1:]]) if width else ""


def _iter_text_rows(rows: list[list[_Cell]]) -> Iterator[list[str]]:
    """Yield the rows with a text for each column, including cells that are spanned from above or the left."""
    spans_below: dict[int, tuple[int, str]] = {}
    """By column: the number of further rows that a cell from above spans, and its text."""
    for row in rows:
        column_texts: list[str] = []
        cells = iter(row)
        while len(column_texts) < _MAX_COLUMNS:
            rows_left, text = spans_below.get(len(column_texts), (0, ""))
            if rows_left:
                spans_below[len(column_texts)] = rows_left - 1, text
                column_texts.append(text)
                continue
            cell = next(cells, None)
            if cell is None:
                if not any(rows_left for column, (rows_left, _) in spans_below.items() if column > len(column_texts)):
                    break
                column_texts.append("")
                continue
            text = " ".join(cell.text.replace(_HEADING_START, "").split()).replace("|", "\\|")
            repeated_text = text if len(text) <= MAX_REPEATED_LENGTH else ""
            for column in range(cell.columns):
                spans_below[len(column_texts)] = cell.rows - 1, repeated_text
                column_texts.append(repeated_text if column else text)
        yield column_texts


def format_rows(rows: list[list[str]]) -> str:
    """Return rows of plain texts as a Markdown table, even if a text is Markdown with a table of its own."""
    return format_table([[_Cell(" ".join(text.split()) if len(rows) > 1 else text) for text in row] for row in rows])


def _join_pieces(pieces: list[Piece]) -> str:
    """Join pieces, without the white space at the beginning and end of lines."""
    texts: list[str] = []
    newlines, ends_with_space = 0, True
    for piece in pieces:
        if isinstance(piece, int):
            newlines = max(newlines, piece)
            continue
        text = piece if not (newlines or ends_with_space) or isinstance(piece, _Verbatim) else piece.lstrip(" ")
        if not text:
            continue
        if newlines and texts:
            texts[-1] = texts[-1].rstrip(" ")
            texts.append("\n" * newlines)
        newlines = 0
        texts.append(text)
        ends_with_space = text.endswith((" ", "\n"))
    return "".join(texts).strip(" \n")
