"""The interface of a run to the log, for the steps of the graph.

A read continues if its log fails. The recording ends at the first failure, so a trajectory in the log may stop early,
but has no gaps. An event in the result reports it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from memagent_graph.documents import DocumentRef
from memagent_graph.errors import RunLogError
from memagent_graph.prompts import Prompts
from memagent_graph.run_log.log import RunLog, log_error
from memagent_graph.run_log.records import Conversation, StrategyId


@dataclass
class Recording:
    """The entries that one call of the graph writes to a log."""

    log: RunLog
    settings: Mapping[str, Any]
    strategy: StrategyId
    checkpointed: bool = True
    """Whether steps have checkpoints. If so, a step is committed only after its conversation is in the log, so a
    resumed run has no gap. Without checkpoints, a step is written while the next step waits for the policy."""
    failure: str | None = None
    """The reason why the recording ended early, or None."""
    reported: bool = False
    """Whether the run's result has an event for the failure."""
    _pending: list[Future[Any]] = field(default_factory=list)
    _settled_later: list[Future[Any]] = field(default_factory=list)
    _begun: bool = False
    _recorded: set[tuple[str, str]] = field(default_factory=set)
    """The branches and roles that have a conversation in the log."""
    _ended: bool = False

    def stop(self) -> None:
        """Mark the read as failed. The next `settle` waits for all entries."""
        self._ended = True

    def begin(
        self,
        run_id: str,
        question: str,
        document: DocumentRef,
        prompts: Prompts,
        trace: Mapping[str, str],
        *,
        afresh: bool = False,
    ) -> None:
        """Log the start of the run, once per call of the graph. `afresh` means that the run does not continue."""
        if not self._begun:
            self._begun = True
            run = run_id, question, document, self.settings, self.strategy
            self._submit(lambda: self.log.begin(*run, prompts=prompts, trace=trace, afresh=afresh))

    def record(self, conversation: Conversation, prompt_texts: Sequence[str]) -> None:
        """Log a conversation. Only the first one of a branch and role supersedes earlier executions."""
        key = conversation.branch, conversation.role
        is_first = key not in self._recorded
        self._submit(lambda: self.log.record(conversation, prompt_texts, supersede=is_first))
        self._recorded.add(key)

    def end(self, run_id: str, stop_reason: str, answer: str | None) -> None:
        """Log the end of the run."""
        self._submit(lambda: self.log.end(run_id, stop_reason, answer))
        self._ended = True

    async def settle(self) -> None:
        """Wait at the end of a step until all necessary entries are in the file."""
        due, self._settled_later = self._settled_later, self._pending
        self._pending = []
        if self.checkpointed or self._ended:
            due, self._settled_later = due + self._settled_later, []
        if due and not due[-1].done():
            self.log.hurry()
            last = asyncio.wrap_future(due[-1])  # futures are done in their order
            # Retrieve the exception even if this step is cancelled, so that asyncio does not warn.
            last.add_done_callback(asyncio.Future.exception)
            await asyncio.wait([last])
        for future in due:
            if (error := future.exception()) is not None:  # such as a value that JSON or SQLite cannot store
                self._fail(error)

    def _submit(self, entry: Callable[[], Future[Any]]) -> None:
        if self.failure is None:
            try:
                self._pending.append(entry())
            except Exception as error:  # noqa: BLE001  a redaction hook can raise anything
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        reason = error if isinstance(error, RunLogError) else log_error(self.log.path, error)
        self.failure = self.failure or reason.message


def new_step() -> str:
    """Return an id for one execution of one step. It is unique across processes, including forked processes."""
    return secrets.token_hex(12)
