"""Shows progress while a corpus is read: documents done, failures, rates and the time left.

On a terminal it is a progress bar, otherwise one line per minute. Both go to standard error.
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

from memagent_corpus.corpus_documents import CorpusDocument, Total
from memagent_corpus.corpus_rows import Row
from memagent_graph.trace import MemoryUpdate

_SECONDS_BETWEEN_LINES: Final = 60.0
_SECONDS_BETWEEN_UPDATES: Final = 0.2


class CorpusProgress(AbstractContextManager["CorpusProgress"]):
    """Shows the progress of one run; a `CorpusWatcher`.

    Args:
        quiet: show nothing.
        console: where progress is shown; standard error by default.
    """

    def __init__(self, *, quiet: bool = False, console: rich.console.Console | None = None) -> None:
        self._console = console or rich.console.Console(stderr=True, highlight=False)
        self._quiet = quiet
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[status]}"),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("reading", total=None, status="")
        self._total = Total(None, None)
        self._skipped = self._skipped_bytes = self._read = self._read_bytes = self._failed = self._tokens = 0
        self._sees_chunks = False
        self._began = self._last_update = self._last_line = time.monotonic()

    def __enter__(self) -> CorpusProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def on_start(self, total: Total) -> None:
        """Start the clock."""
        self._total = total
        self._began = self._last_line = time.monotonic()
        self._bar.update(self._task, total=total.size or total.documents)

    def on_skip(self, documents: int, size: int) -> None:
        """Count documents that already have all of their rows; `size` is in bytes."""
        self._skipped += documents
        self._skipped_bytes += size
        self._show()

    def on_update(self, update: MemoryUpdate) -> None:
        """Count the tokens of one chunk."""
        self._sees_chunks = True
        self._tokens += update.prompt_tokens + update.completion_tokens
        self._show()

    def on_document(self, document: CorpusDocument, rows: Sequence[Row]) -> None:
        """Count a finished document."""
        self._read += 1
        self._read_bytes += document.size or 0
        self._failed += any(row.failed for row in rows)
        if not self._sees_chunks:  # other processes read them
            self._tokens += sum(row.usage.prompt_tokens + row.usage.completion_tokens for row in rows)
        self._show()

    @property
    def status(self) -> str:
        """Documents done, failures, rates and the time left, as one line."""
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
        """Estimate the time left from bytes if they are known, else from the number of documents."""
        if self._total.size and self._read_bytes:
            left = self._total.size - self._skipped_bytes - self._read_bytes
            return max(0.0, seconds * left / self._read_bytes)
        if self._total.documents and self._read:
            return max(0.0, seconds * (self._total.documents - self._skipped - self._read) / self._read)
        return None

    def _show(self) -> None:
        now = time.monotonic()
        if self._quiet or now - self._last_update < _SECONDS_BETWEEN_UPDATES:
            return
        self._last_update = now
        if self._console.is_terminal:
            completed = self._skipped_bytes + self._read_bytes if self._total.size else self._skipped + self._read
            self._bar.update(self._task, completed=completed, status=self.status)
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._console.print(self.status, markup=False, soft_wrap=True)
