"""Converts rich text (.rtf) with striprtf. It drops scripts, notes, headers and text boxes, so these become text."""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from striprtf.striprtf import rtf_to_text

from memagent_converters.html_to_markdown import UNDESCRIBED_PICTURES, list_omissions
from memagent_graph.converters import Block, Parts, SourceFile

_SUPERSCRIPT_AND_SUBSCRIPT_COMMANDS: Final = re.compile(
    r"\\(super|up[1-9]\d*|sub|dn[1-9]\d*)(?![a-z0-9])(?:\\(?!nosupersub|chftn|u-?\d)[a-z]+-?\d*)* ?"
    r"(?=[^\\} ]|\\(?:'|u-?\d))"
)
_DELETED_COMMAND: Final = re.compile(r"\\deleted(?![a-z0-9])")
_GROUP_TOKENS: Final = re.compile(
    r"(?:\\\*)?\\(footnote|annotation|(?:head|foot)er[lrf]?|shp(?:inst|grp|txt)?)(?![a-z]) ?|\\.|[{}]", re.DOTALL
)
_OMITTED_CONTENT: Final = {
    "embedded objects": re.compile(r"\\objdata\b"),
    UNDESCRIBED_PICTURES: re.compile(r"(?<!\\nonshppict\{)\\pict\b"),
}
_PICTURE_IN_SHAPE: Final = re.compile(r"\\sv\s*\{\\pict\b")
_PICTURE_OF_SHAPE: Final = re.compile(r"\\shprslt\b[^{}]*\{\\pict\b")
"""The picture of a shape for older programs: a copy of the picture in the shape, or the only one of a drawing."""

_ESCAPED_BYTES: Final = {byte: f"\\'{byte:02x}" for byte in range(0x80, 0x100)}
"""A byte beyond ASCII is a character of the code page, as is an escaped one."""


def convert(source: SourceFile) -> Parts:
    """Convert a rich text file."""
    rtf = source.read().decode("latin-1").translate(_ESCAPED_BYTES)
    rtf_with_script_marks = _SUPERSCRIPT_AND_SUBSCRIPT_COMMANDS.sub(
        lambda match: r"\plain " + ("^" if match[1].startswith(("super", "up")) else "_"), rtf
    )
    text = rtf_to_text(_inline_notes(_DELETED_COMMAND.sub(r"\\*", rtf_with_script_marks)), errors="replace")
    # striprtf leaves the two surrogates of a character beyond 16 bits separate.
    yield Block(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").strip() + "\n")
    omission_counts = Counter({kind: len(pattern.findall(rtf)) for kind, pattern in _OMITTED_CONTENT.items()})
    omission_counts[UNDESCRIBED_PICTURES] -= min(
        len(_PICTURE_IN_SHAPE.findall(rtf)), len(_PICTURE_OF_SHAPE.findall(rtf))
    )
    yield from list_omissions(omission_counts)


def _inline_notes(rtf: str) -> str:
    """Return a document with its notes, headers, footers and text boxes as groups of the text, which striprtf keeps."""
    closing_marks: list[str] = []
    """The text to write at the end of each open group."""

    def replace_token(match: re.Match[str]) -> str:
        if match[0] == "{":
            closing_marks.append("")
        elif match[0] == "}" and closing_marks:
            return closing_marks.pop() + "}"
        elif match[1] and closing_marks:
            is_note = match[1] in {"footnote", "annotation"}
            is_shape = match[1] in {"shp", "shpinst", "shpgrp"}  # without a text box, it does not end its line
            closing_marks[-1] = "]" if is_note else "" if is_shape else r"\par "
            return "[Note: " if is_note else r"\par " if match[1] == "shptxt" else ""
        return match[0]

    return _GROUP_TOKENS.sub(replace_token, rtf)
