"""Finds headings and numbered clauses in a text, with their positions and labels.

These are Markdown headings (most converters write Markdown) and, in any text, lines that begin with the number of a
clause, such as `4.2 Termination`, `Article IV` or `§ 12 Notices`. Quantities and lists begin with numbers, too. So a
number must follow the previous number (4.2 after 4.1 or 4), and a line with a single number must be short and not part
of a list or a sentence. If it ends with a full stop, it must be in title case. Where these rules fail, evidence names
the previous section.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from memagent_graph.documents.sources import MEDIA_TYPES, SourceMark
from memagent_graph.plain_text import in_one_line

MAX_HEADINGS: Final = 100_000
MAX_LABEL_CHARACTERS: Final = 120
_MAX_TITLE: Final = 80
_MAX_WORDS: Final = 12
_SMALL_WORDS: Final = re.compile(r"an?|and|as|at|by|for|from|in|not|of|on|or|the|this|to|under|with")
"""Words in lower case in a title in title case."""
_MAX_STEP: Final = 4
"""Maximum difference between the numbers of consecutive clauses."""
_MIN_WRAPPED_LINE: Final = 50
"""The minimum length of a line in a wrapped paragraph."""
_BLOCK: Final = 1 << 20
_MARKDOWN_TYPES: Final = frozenset(
    MEDIA_TYPES[kind] for kind in ("md", "html", "docx", "pptx", "xlsx", "odt", "odp", "ods", "epub")
)
_KEYWORD: Final = r"(?:Article|Section|Clause|Chapter|Part|Annex|Appendix|Schedule|Exhibit)"
_LINE: Final = re.compile(
    rf"""^(?:
      (?P<fence>\ {{0,3}}(?:```|~~~))
    | \ {{0,3}}(?P<hashes>\#{{1,6}})[^\S\n]+(?P<heading>\S[^\n]*)
    | [^\S\n]*(?:\#{{1,6}}[^\S\n]+)?(?:\*\*|__)?
      (?: (?P<named>
              (?:{_KEYWORD}|{_KEYWORD.upper()})[^\S\n]+(?:\d+(?:\.\d+)*[a-z]?|[IVXLC]+|[A-Z])\b
            | §+[^\S\n]*\d+(?:\.\d+)*[a-z]?
          )
        | (?P<number>\d{{1,3}}(?:\\?\.\d{{1,3}}){{0,5}})
      )
      (?P<stop>\\?[.:)])?(?:[^\S\n]+(?P<title>\S[^\n]*))?$
    )""",
    re.MULTILINE | re.VERBOSE,
)
_CONTENTS_LINE: Final = re.compile(r"(?:\.{2,}|(?:\. ){2,}|\s{2,}|\t)\s*\d+\s*$")
_TITLE_END: Final = re.compile(r"\.\s+[^\W\d_a-z]|:\s|\s[–—]\s")
_NEXT_LINE: Final = re.compile(r"\s*\n\s*(?P<number>\d{1,3}(?:\.\d{1,3})*)[.)]?\s")


def is_markdown(media_type: str) -> bool:
    """Return whether texts of this type are stored as Markdown."""
    return media_type in _MARKDOWN_TYPES


def find_headings(pieces: Iterable[str], media_type: str) -> list[SourceMark]:
    """Return the headings and numbered clauses of a text, in order; at most `MAX_HEADINGS`.

    Args:
        pieces: the text, in order.
        media_type: the type of the document. If it is not Markdown, a line that begins with # needs blank lines around
            it, because it may be a comment.
    """
    marks: list[SourceMark] = []
    finder = _HeadingFinder(strict=not is_markdown(media_type))
    for start, block in _split_blocks(pieces):
        for mark in finder.marks(block, start):
            marks.append(mark)
            if len(marks) == MAX_HEADINGS:
                return marks
    return marks


def find_heading_starts(text: str, start: int, end: int, *, markdown: bool) -> list[int]:
    """Return the starts of headings between two characters of a text, in order. Chunks can end there."""
    begin = text.rfind("\n", 0, start) + 1
    window = text[begin : end + _MAX_TITLE * 4]
    finder = _HeadingFinder(strict=not markdown, before="\n" if begin else "\n\n")
    starts = (begin + mark.start_char for mark in finder.marks(window, 0))
    return [position for position in starts if start < position <= end]


class _HeadingFinder:
    """Finds headings in a sequence of blocks of whole lines."""

    def __init__(self, *, strict: bool, before: str = "\n\n") -> None:
        self._strict = strict
        self._before = before
        self._is_code = False
        self._number: tuple[int, ...] | None = None
        self._item: tuple[int, int] | None = None
        """The number of the last list item, and its end in the block."""

    def marks(self, block: str, start: int) -> Iterator[SourceMark]:
        """Yield the headings of the next block, which begins at a character of the document."""
        for line in _LINE.finditer(block):
            if line["fence"]:
                self._is_code = not self._is_code
            elif not self._is_code and (label := self._label(line, block)):
                yield SourceMark(start + line.start(), label)
        self._before, self._item = (self._before + block)[-4:], None

    def _label(self, line: re.Match[str], block: str) -> str | None:
        """Return the label of a line that is a heading, or None."""
        if line["heading"] is None:
            return self._find_clause(line, block)
        if self._strict and not self._stands_alone(line, block):
            return None
        label = _remove_markup(line["heading"].rstrip("#"))
        if number := re.match(r"\d{1,3}(?:\.\d{1,3})*", label):
            self._number = _parse_number(number[0])
        return in_one_line(label, MAX_LABEL_CHARACTERS) or None

    def _find_clause(self, line: re.Match[str], block: str) -> str | None:
        """Return the label of a line that begins with the number of a clause, or None."""
        title, name = _remove_markup(line["title"] or ""), _remove_markup(line["named"] or line["number"])
        if _CONTENTS_LINE.search((line["title"] or "")[-40:]) or (title and title[0].islower()):
            return None
        short = _find_short_title(title)
        if line["named"] is not None:
            return in_one_line(f"{name} {short}".strip(), MAX_LABEL_CHARACTERS) if short is not None else None
        number = _parse_number(name)
        is_item = len(number) == 1 and (
            _is_in_sentence(line, block) or self._is_item(line, block, number, whole=short == title) or short is None
        )
        has_title = bool(title) and (title[0].isalpha() or title[0] in "\"“'(")
        if is_item or not has_title or not _may_follow(self._number, number):
            return None
        self._number = number
        stop = (line["stop"] or "").strip("\\")
        return in_one_line(f"{name}{stop} {short or ''}".strip(), MAX_LABEL_CHARACTERS)

    def _is_item(self, line: re.Match[str], block: str, number: tuple[int, ...], *, whole: bool) -> bool:
        """Return whether a line with a single number is a list item or a sentence, and not a heading."""
        following = _NEXT_LINE.match(block, line.end())
        after = _parse_number(following["number"]) if following else None
        is_continued = after is not None and len(after) == 1 and after[0] == number[0] + 1
        continues_list = (
            self._item is not None
            and self._item[0] + 1 == number[0]
            and not block[self._item[1] : line.start()].strip()
        )
        if is_continued or continues_list:
            self._item = number[0], line.end()
            return True
        return not whole and line["stop"] is None

    def _stands_alone(self, line: re.Match[str], block: str) -> bool:
        """Return whether a line is between blank lines (or the ends of the text)."""
        before = (self._before + block[max(0, line.start() - 4) : line.start()]).replace("\r", "")
        after = block[line.end() : line.end() + 4].replace("\r", "")
        return before.endswith("\n\n") and after[:2] in {"\n\n", "\n", ""}


def _is_in_sentence(line: re.Match[str], block: str) -> bool:
    """Return whether a line continues a sentence of the previous line, as "7. It does" after "under section"."""
    end = line.start() - 1
    before = block[block.rfind("\n", 0, max(end, 0)) + 1 : max(end, 0)].strip()
    return len(before) >= _MIN_WRAPPED_LINE and (before[-1].islower() or before[-1] == ",") and not before[0].isdigit()


def _split_blocks(pieces: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield blocks of whole lines, about a megabyte long, with the position of their first character."""
    start, rest = 0, ""
    for piece in pieces:
        rest += piece
        while len(rest) > 2 * _BLOCK:
            cut = rest.rfind("\n\n", _BLOCK, 2 * _BLOCK) + 1 or rest.rfind("\n", _BLOCK, 2 * _BLOCK)
            cut = cut + 1 if cut > 0 else 2 * _BLOCK
            yield start, rest[:cut]
            start, rest = start + cut, rest[cut:]
    yield start, rest


def _parse_number(number: str) -> tuple[int, ...]:
    return tuple(map(int, number.split(".")))


def _may_follow(before: tuple[int, ...] | None, number: tuple[int, ...]) -> bool:
    """Return whether a clause number may follow another: the next at a level, the first below it, or a restart."""
    if 0 in number:
        return False
    if before is None or set(number) == {1}:
        return True
    common = next((level for level, (one, two) in enumerate(zip(before, number, strict=False)) if one != two), None)
    if common is None:
        return len(number) > len(before) and set(number[len(before) :]) == {1}
    return 0 < number[common] - before[common] <= _MAX_STEP and set(number[common + 1 :]) <= {1}


def _find_short_title(title: str) -> str | None:
    """Return the title of a clause: the line, or its part before a full stop. None if a sentence begins it."""
    end = _TITLE_END.search(title[: _MAX_TITLE + 4])
    if end is not None:
        short = title[: end.start()]
        return short if len(short.split()) <= _MAX_WORDS // 2 else None
    if title.endswith(".") and _is_in_title_case(title):
        return title[:-1]
    return title if len(title) <= _MAX_TITLE and not title.endswith((".", ";", ",")) else None


def _is_in_title_case(title: str) -> bool:
    """Return whether a text is a few words in title case."""
    words = title.split()
    return len(words) <= _MAX_WORDS and all(not word[0].islower() or _SMALL_WORDS.fullmatch(word) for word in words)


def _remove_markup(text: str) -> str:
    """Return a text without Markdown's marks, and with single spaces."""
    return " ".join(re.sub(r"\*\*|__|`|\\(?=[.#*_\-()\[\]])", "", text).split())
