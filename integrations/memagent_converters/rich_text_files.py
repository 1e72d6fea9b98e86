"""Rich text (.rtf), by striprtf. Superscripts, subscripts, notes and headers, which it drops, are marked first."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from memagent_converters.html_to_markdown import PICTURES, list_omissions
from memagent_graph.converters import Block, Parts, SourceFile

_SCRIPTS: Final = re.compile(
    r"\\(super|up[1-9]\d*|sub|dn[1-9]\d*)(?![a-z0-9])(?:\\(?!nosupersub|chftn|u-?\d)[a-z]+-?\d*)* ?"
    r"(?=[^\\} ]|\\(?:'|u-?\d))"
)
_DELETED: Final = re.compile(r"\\deleted(?![a-z0-9])")
_GROUPS: Final = re.compile(r"(?:\\\*)?\\(footnote|annotation|(?:head|foot)er[lrf]?)(?![a-z]) ?|\\.|[{}]", re.DOTALL)
_LOST: Final = {"embedded objects": re.compile(r"\\objdata\b"), PICTURES: re.compile(r"\\pict\b")}


def convert(source: SourceFile) -> Parts:
    """Convert a rich text file."""
    from striprtf.striprtf import rtf_to_text  # noqa: PLC0415  the extra `files`

    raw = source.read().decode("latin-1")
    marked = _SCRIPTS.sub(lambda match: r"\plain " + ("^" if match[1].startswith(("super", "up")) else "_"), raw)
    text = rtf_to_text(_with_notes(_DELETED.sub(r"\\*", marked)), errors="replace")
    # It leaves the two halves of a character beyond 16 bits apart.
    yield Block(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").strip() + "\n")
    yield from list_omissions(Counter({what: len(mark.findall(raw)) for what, mark in _LOST.items()}))


def _with_notes(rtf: str) -> str:
    """Return a document whose notes, headers and footers are groups of its text."""
    ends: list[str] = []
    """The end marks of the open groups."""

    def replace_piece(match: re.Match[str]) -> str:
        if match[0] == "{":
            ends.append("")
        elif match[0] == "}" and ends:
            return ends.pop() + "}"
        elif match[1] and ends:
            begin, ends[-1] = ("[Note: ", "]") if match[1] in {"footnote", "annotation"} else ("", r"\par ")
            return begin
        return match[0]

    return _GROUPS.sub(replace_piece, rtf)
