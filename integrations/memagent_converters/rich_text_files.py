"""Rich text (.rtf), with striprtf; powers and indices are marked before, as it drops their form."""

from __future__ import annotations

import re
from typing import Final

from memagent_graph.converters import Block, Omission, Parts, SourceFile

_SCRIPTS: Final = re.compile(r"\\(super|sub)(?![a-z0-9])(?:\\(?!nosupersub)[a-z]+-?\d*)* ?")
_OBJECTS: Final = re.compile(r"\\objdata\b")


def convert(source: SourceFile) -> Parts:
    """Convert a rich text file."""
    from striprtf.striprtf import rtf_to_text  # noqa: PLC0415  the extra `files`

    raw = source.read().decode("latin-1")
    marked = _SCRIPTS.sub(lambda match: r"\plain " + ("^" if match[1] == "super" else "_"), raw)
    yield Block(rtf_to_text(marked, errors="replace").strip() + "\n")
    if count := len(_OBJECTS.findall(raw)):
        yield Omission("embedded objects", "", "Save it as DOCX, and read that.", count)
