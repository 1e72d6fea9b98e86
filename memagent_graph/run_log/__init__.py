"""The log of runs: all prompts and completions, in one SQLite file that many processes may write to.

records       the contents as data: runs, conversations, events, rewards; filters, totals, the trace of a run
tables        the storage of records: columns, blobs, the tables, and the statements that change them
log           RunLog: write, query, reward, delete
exchange      runs as Parquet files and back, and several logs as one
"""

from __future__ import annotations

from memagent_graph.run_log.log import RunLog
from memagent_graph.run_log.records import (
    Conversation,
    LoggedEvent,
    LoggedRun,
    Outcome,
    Reward,
    RunFilter,
    RunRecord,
    RunTotals,
    TextKind,
)

__all__ = [
    "Conversation",
    "LoggedEvent",
    "LoggedRun",
    "Outcome",
    "Reward",
    "RunFilter",
    "RunLog",
    "RunRecord",
    "RunTotals",
    "TextKind",
]
