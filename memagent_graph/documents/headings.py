"""Finds headings and numbered clauses in a text, with their positions and labels.

These are Markdown headings (most converters write Markdown) and, in any text, lines that begin with the number of a
clause, such as `4.2 Termination`, `Article IV` or `§ 12 Notices`. Quantities and list items begin with numbers, too. So
a number must follow the previous number (4.2 after 4.1 or 4), and a line with a single number must be short and not
part of a list or a sentence. If such a line ends with a full stop, it must be in title case. If these rules miss a
heading, evidence names the section before.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Final

from memagent_graph.documents.sources import MEDIA_TYPES, SourceMark
from memagent_graph.plain_text import make_one_line

MAX_HEADINGS: Final = 100_000
MAX_LABEL_CHARACTERS: Final = 120
_MAX_TITLE_CHARACTERS: Final = 80
_MAX_TITLE_WORDS: Final = 12
_SMALL_WORDS: Final = re.compile(r"an?|and|as|at|by|for|from|in|not|of|on|or|the|this|to|under|with")
"""Words that stay in lower case in a title in title case."""
_MAX_NUMBER_STEP: Final = 4
"""Maximum difference between the numbers of consecutive clauses."""
_MIN_WRAPPED_CHARACTERS: Final = 50
"""The minimum length of a line in a wrapped paragraph."""
_BLOCK_CHARACTERS: Final = 1 << 20
_MARKDOWN_TYPES: Final = frozenset(
    MEDIA_TYPES[kind] for kind in ("md", "html", "docx", "pptx", "xlsx", "odt", "odp", "ods", "epub")
)
_KEYWORD: Final = r"(?:Article|Section|Clause|Chapter|Part|Annex|Appendix|Schedule|Exhibit)"
_LINE: Final = re.compile(
    rf"""^(?:
      \ {{0,3}}(?P<fence>`{{3,}}(?=[^`\n]*$)|~{{3,}})(?P<language>[^\n]*)
    | \ {{0,3}}(?P<hashes>\#{{1,6}})[^\S\n]+(?P<heading>\S[^\n]*)
    | [^\S\n]*(?:\#{{1,6}}[^\S\n]+)?(?:\*\*|__)?
      (?: (?P<named>
              (?:{_KEYWORD}|{_KEYWORD.upper()})[^\S\n]+(?:\d+(?:\.\d+)*[a-z]?|[IVXLC]+|[A-Z])\b
            | §+[^\S\n]*\d+(?:\.\d+)*[a-z]?
          )
        | (?P<number>\d{{1,3}}(?:\\?\.\d{{1,3}}){{0,5}})
      )
      (?P<stop>\\?[.:)])?(?:[^\S\n]+(?P<title>\S[^\n]*))?[^\S\n]*$
    )""",
    re.MULTILINE | re.VERBOSE,
)
_CONTENTS_LINE: Final = re.compile(r"(?:\.{2,}|(?:\. ){2,}|\s{2,}|\t)\s*\d+\s*$")
_TITLE_END: Final = re.compile(r"\.\s+[^\W\d_a-z]|:\s|\s[–—]\s")
_NEXT_NUMBERED_LINE: Final = re.compile(r"[^\S\n]*\n\s*+(?P<number>\d{1,3}(?:\.\d{1,3})*)[.)]?\s")


def find_headings(pieces: Iterable[str], media_type: str) -> list[SourceMark]:
    """Return the headings and numbered clauses of a text, in order; at most `MAX_HEADINGS`.

    Args:
        pieces: the text, in consecutive pieces.
        media_type: the type of the document. If it is not Markdown, a line that begins with # needs blank lines around
            it, because it may be a comment.
    """
    finder = _HeadingFinder(media_type)
    marks = (mark for start, block in _split_blocks(pieces) for mark in finder.find_marks(block, start))
    return list(itertools.islice(marks, MAX_HEADINGS))


def find_heading_starts(text: str, start: int, end: int, media_type: str) -> list[int]:
    """Return the starts of headings between two characters of a text, in order. Chunks can end there."""
    line_start = text.rfind("\n", 0, start) + 1
    window = text[line_start : end + _MAX_TITLE_CHARACTERS * 4]
    finder = _HeadingFinder(media_type, preceding_text="\n" if line_start else "\n\n")
    starts = (line_start + mark.start_char for mark in finder.find_marks(window, 0))
    return [position for position in starts if start < position <= end]


class _HeadingFinder:
    """Finds headings in a sequence of blocks of whole lines."""

    def __init__(self, media_type: str, preceding_text: str = "\n\n") -> None:
        self._is_markdown = media_type in _MARKDOWN_TYPES
        self._preceding_text = preceding_text
        self._fence = ""
        """The beginning of a block of code, whose end is at least as long. ~~~ in plain text underlines a title."""
        self._last_number: tuple[int, ...] | None = None
        self._last_item: tuple[int, int] | None = None
        """The number of the last list item, and its end in the block."""

    def find_marks(self, block: str, start: int) -> Iterator[SourceMark]:
        """Yield the headings of the next block, which begins at the character `start` of the document."""
        for line in _LINE.finditer(block):
            if (fence := line["fence"]) and self._fence:
                is_end = fence.startswith(self._fence) and not line["language"].strip()
                self._fence = "" if is_end else self._fence
            elif fence:
                self._fence = fence if fence[0] == "`" or self._is_markdown else ""
            elif not self._fence and (label := self._make_label(line, block)):
                yield SourceMark(start + line.start(), label)
        self._preceding_text, self._last_item = (self._preceding_text + block)[-4:], None

    def _make_label(self, line: re.Match[str], block: str) -> str | None:
        """Return the label of a line that is a heading, or None."""
        if line["heading"] is None:
            return self._make_clause_label(line, block)
        if not self._is_markdown and not self._stands_alone(line, block):
            return None
        label = _remove_markup(line["heading"].rstrip().rstrip("#"))
        if number := re.match(r"\d{1,3}(?:\.\d{1,3})*", label):
            self._last_number = _parse_number(number[0])
        return make_one_line(label, MAX_LABEL_CHARACTERS) or None

    def _make_clause_label(self, line: re.Match[str], block: str) -> str | None:
        """Return the label of a line that begins with the number of a clause, or None."""
        title, name = _remove_markup(line["title"] or ""), _remove_markup(line["named"] or line["number"])
        if _CONTENTS_LINE.search((line["title"] or "")[-40:]) or (title and title[0].islower()):
            return None
        short_title = _find_short_title(title)
        if line["named"] is not None:
            if short_title is None:
                return None
            return make_one_line(f"{name} {short_title}".strip(), MAX_LABEL_CHARACTERS)
        number = _parse_number(name)
        is_item = len(number) == 1 and (
            _is_in_sentence(line, block)
            or self._is_list_item(line, block, number, is_whole_title=short_title == title)
            or short_title is None
        )
        has_title = bool(title) and (title[0].isalpha() or title[0] in "\"“'(")
        if is_item or not has_title or not _may_follow(self._last_number, number):
            return None
        self._last_number = number
        stop = (line["stop"] or "").strip("\\")
        return make_one_line(f"{name}{stop} {short_title or ''}".strip(), MAX_LABEL_CHARACTERS)

    def _is_list_item(self, line: re.Match[str], block: str, number: tuple[int, ...], *, is_whole_title: bool) -> bool:
        """Return whether a line with a single number is a list item or a sentence, and not a heading."""
        next_line = _NEXT_NUMBERED_LINE.match(block, line.end())
        precedes_item = next_line is not None and _parse_number(next_line["number"]) == (number[0] + 1,)
        last_item, self._last_item = self._last_item, None  # this line is between it and later items
        follows_item = (
            last_item is not None and last_item[0] + 1 == number[0] and not block[last_item[1] : line.start()].strip()
        )
        if precedes_item or follows_item:
            self._last_item = number[0], line.end()
            return True
        return not is_whole_title and line["stop"] is None

    def _stands_alone(self, line: re.Match[str], block: str) -> bool:
        """Return whether a line is between blank lines (or the ends of the text)."""
        text_before = (self._preceding_text + block[max(0, line.start() - 4) : line.start()]).replace("\r", "")
        text_after = block[line.end() : line.end() + 4].replace("\r", "")
        return text_before.endswith("\n\n") and text_after[:2] in {"\n\n", "\n", ""}


def _is_in_sentence(line: re.Match[str], block: str) -> bool:
    """Return whether a line continues a sentence of the previous line, as "7. It does" after "under section"."""
    end = max(line.start() - 1, 0)
    previous_line = block[block.rfind("\n", 0, end) + 1 : end].strip()
    is_wrapped = len(previous_line) >= _MIN_WRAPPED_CHARACTERS and not previous_line[0].isdigit()
    return is_wrapped and (previous_line[-1].islower() or previous_line[-1] == ",")


def _split_blocks(pieces: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield blocks of whole lines, about a megabyte long, with the position of their first character."""
    minimum, maximum = _BLOCK_CHARACTERS, 2 * _BLOCK_CHARACTERS
    start, buffer = 0, ""
    for piece in pieces:
        buffer += piece
        while len(buffer) > maximum:
            newline = buffer.rfind("\n\n", minimum, maximum) + 1 or buffer.rfind("\n", minimum, maximum)
            end = newline + 1 if newline > 0 else maximum
            yield start, buffer[:end]
            start, buffer = start + end, buffer[end:]
    yield start, buffer


def _parse_number(number: str) -> tuple[int, ...]:
    return tuple(map(int, number.split(".")))


def _may_follow(previous: tuple[int, ...] | None, number: tuple[int, ...]) -> bool:
    """Return whether a clause number may follow `previous`: the next at a level, the first below it, or a restart."""
    if 0 in number:
        return False
    if previous is None or set(number) == {1}:
        return True
    level = next((i for i, (old, new) in enumerate(zip(previous, number, strict=False)) if old != new), None)
    if level is None:
        return len(number) > len(previous) and set(number[len(previous) :]) == {1}
    return 0 < number[level] - previous[level] <= _MAX_NUMBER_STEP and set(number[level + 1 :]) <= {1}


def _find_short_title(title: str) -> str | None:
    """Return the title of a clause: the line, or its part before a full stop. None if the line begins a sentence."""
    title_end = _TITLE_END.search(title[: _MAX_TITLE_CHARACTERS + 4])
    if title_end is not None:
        short_title = title[: title_end.start()]
        return short_title if len(short_title.split()) <= _MAX_TITLE_WORDS // 2 else None
    if title.endswith(".") and _is_in_title_case(title):
        return title[:-1]
    return title if len(title) <= _MAX_TITLE_CHARACTERS and not title.endswith((".", ";", ",")) else None


def _is_in_title_case(title: str) -> bool:
    """Return whether a text is a few words in title case."""
    words = title.split()
    return len(words) <= _MAX_TITLE_WORDS and all(
        not word[0].islower() or _SMALL_WORDS.fullmatch(word) for word in words
    )


def _remove_markup(text: str) -> str:
    """Return a text without Markdown markup, and with single spaces."""
    return " ".join(re.sub(r"\*\*|__|`|\\(?=[.#*_\-()\[\]])", "", text).split())
