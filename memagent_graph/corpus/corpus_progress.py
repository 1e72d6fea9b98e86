"""What a person sees of a corpus while it is read: how far it is, how fast, what failed, and the time left.

On a terminal a bar, on anything else a line once a minute; on standard error in both cases.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Final

import rich.console
from rich.progress import BarColumn, Progress, TextColumn

from memagent_graph.corpus.corpus_documents import CorpusDocument, Total
from memagent_graph.corpus.corpus_rows import Row
from memagent_graph.trace import MemoryUpdate

_SECONDS_BETWEEN_LINES: Final = 60.0
_SECONDS_BETWEEN_DRAWINGS: Final = 0.2


class CorpusProgress(AbstractContextManager["CorpusProgress"]):
    """Shows the progress of one run; a `CorpusWatcher`.

    Args:
        quiet: show nothing.
        console: where it is shown; standard error if it is left out.
    """

    def __init__(self, *, quiet: bool = False, console: rich.console.Console | None = None) -> None:
        self._console = console or rich.console.Console(stderr=True, highlight=False)
        self._quiet = quiet
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[told]}"),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("reading", total=None, told="")
        self._total = Total(None, None)
        self._skipped = self._skipped_bytes = self._read = self._read_bytes = self._failed = self._tokens = 0
        self._sees_chunks = False
        self._began = self._drawn = self._told_last = time.monotonic()

    def __enter__(self) -> CorpusProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begins(self, total: Total) -> None:
        """The run begins."""
        self._total = total
        self._began = self._told_last = time.monotonic()
        self._bar.update(self._task, total=total.size or total.documents)

    def skips(self, documents: int, size: int) -> None:
        """These documents have their rows already."""
        self._skipped += documents
        self._skipped_bytes += size
        self._show()

    def reads(self, update: MemoryUpdate) -> None:
        """A chunk was read."""
        self._sees_chunks = True
        self._tokens += update.prompt_tokens + update.completion_tokens
        self._show()

    def ends(self, document: CorpusDocument, rows: Sequence[Row]) -> None:
        """A document has its rows."""
        self._read += 1
        self._read_bytes += document.size or 0
        self._failed += any(row.failed for row in rows)
        if not self._sees_chunks:  # they are read elsewhere
            self._tokens += sum(row.usage.prompt_tokens + row.usage.completion_tokens for row in rows)
        self._show()

    @property
    def told(self) -> str:
        """How far, failures, rates, and the time left."""
        done = self._skipped + self._read
        of = f" of {self._total.documents:,}" if self._total.documents is not None else ""
        seconds = max(time.monotonic() - self._began, 1e-9)
        parts = [
            f"{done:,}{of} documents",
            f"{self._failed:,} failed" if self._failed else "",
            f"{60 * self._read / seconds:,.1f}/min",
            f"{self._tokens / seconds:,.0f} tokens/s",
        ]
        if (left := self._seconds_left(seconds)) is not None:
            parts.append(f"{timedelta(seconds=round(left))} left")
        return ", ".join(filter(None, parts))

    def _seconds_left(self, seconds: float) -> float | None:
        """By bytes where they are known, as documents differ in length."""
        if self._total.size and self._read_bytes:
            left = self._total.size - self._skipped_bytes - self._read_bytes
            return max(0.0, seconds * left / self._read_bytes)
        if self._total.documents and self._read:
            return max(0.0, seconds * (self._total.documents - self._skipped - self._read) / self._read)
        return None

    def _show(self) -> None:
        now = time.monotonic()
        if self._quiet or now - self._drawn < _SECONDS_BETWEEN_DRAWINGS:
            return
        self._drawn = now
        if self._console.is_terminal:
            completed = self._skipped_bytes + self._read_bytes if self._total.size else self._skipped + self._read
            self._bar.update(self._task, completed=completed, told=self.told)
        elif now - self._told_last >= _SECONDS_BETWEEN_LINES:
            self._told_last = now
            self._console.print(self.told, markup=False, soft_wrap=True)
