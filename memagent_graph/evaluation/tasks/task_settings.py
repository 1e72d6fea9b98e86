"""What a task is made with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memagent_graph.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Everything but length and index that a sample depends on."""

    tokenizer: Tokenizer
    """The policy's own: lengths are exact to it."""
    seed: int = 0
    small: bool = False
    """The small-context variant, for policies with budgets of a few hundred tokens; each task says what it shrinks."""
    haystack: Path | None = None
    """A text file, or a folder of .txt and .md files, to take prose from; the prose found with Python if None."""
    data: Path | None = None
    """A data file, or a folder of data files under their published names; `evaluation` in the data folder if None."""
