"""Makes text of documents and policies harmless in each format that a report is written in.

Documents are not trusted: what they say may be a spreadsheet formula, a link, an image that is loaded from elsewhere,
or TeX. In a report it is text, and nothing else.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_UNWRITABLE: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_FORMULA: Final = re.compile(r"^\s*[=+\-@\uff1d\uff0b\uff0d\uff20\u2212|%]|^[\t\r\n]")
_MARKDOWN: Final = re.compile(r"([\\`*_{}\[\]|<>~$&#]|!(?=\[))|(^[+\-=:!])|(?<=^)(\d+)([.)])")
_ACTIVE: Final = re.compile(r"(?i)\b(https?|ftp|file|mailto|javascript|data)(:)|(?<![\w.])(www)(\.)|(@)")
_TEX: Final = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip
_BREAK: Final = "\u2060"
"""The word joiner: it is not seen, and no program takes what it stands in for an address."""
_PATH: Final = re.compile(r"(?<![\w:/.])(?:[A-Za-z]:\\|~?/|\\\\)(?:[^\s'\"/\\]+[/\\])+([^\s'\"/\\]+)")


def writable(text: str) -> str:
    """A text without control characters, changes of direction, and half surrogate pairs, which become U+FFFD."""
    return _UNWRITABLE.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


def one_line(text: str) -> str:
    """A text in one line, as in `writable`."""
    return " ".join(writable(text).split())


def spreadsheet_cell(text: str) -> str:
    """A text that a spreadsheet takes for text: one that would be a formula gets an apostrophe in front."""
    text = writable(text)
    return f"'{text}" if _FORMULA.match(text) else text


def markdown_text(text: str) -> str:
    """A text, in one line, of which Markdown makes no link, image, HTML, TeX, list or table cell."""
    text = _ACTIVE.sub(lambda match: "".join(part for part in match.groups() if part) + _BREAK, one_line(text))
    return _MARKDOWN.sub(_escaped_in_markdown, text)


def _escaped_in_markdown(match: re.Match[str]) -> str:
    return f"{match[3]}\\{match[4]}" if match[3] else f"\\{match[0]}"


def tex_text(text: str) -> str:
    """A text, in one line, of which TeX and BibTeX make no command."""
    return "".join(_TEX.get(character, character) for character in one_line(text))


def without_folders(message: str) -> str:
    """A message of this package with only the last part of each path in it, and without the user's home."""
    home = str(Path.home())
    shown = message.replace(home, "~") if len(home) > 1 else message
    return _PATH.sub(r"\1", shown)
