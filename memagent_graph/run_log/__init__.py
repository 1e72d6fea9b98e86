"""The log of runs: exactly what the policy saw and wrote, in one SQLite file that many processes may write to.

schema      connections, and the version of a file's tables
migration   the tables, and the migration of files of older versions
edits       who replaced a memory
records     its contents as data: runs, conversations, events, rewards
packing     token ids, log-probs and texts as small blobs
writer      one thread per log that commits the entries of many reads
log         RunLog: write, query, reward, delete
filters     which runs are chosen, and their totals
logged_trace  a run's trace from its conversations
rows        records to rows of the tables, and back
recording   one run's interface to it, for the graph's steps
exchange    runs as Parquet and as JSON lines, and back
"""

from __future__ import annotations

from memagent_graph.run_log.filters import RunFilter, RunTotals
from memagent_graph.run_log.log import RunLog
from memagent_graph.run_log.records import (
    Conversation,
    LoggedEvent,
    Outcome,
    Reward,
    RunRecord,
    StrategyId,
    TextKind,
)

__all__ = [
    "Conversation",
    "LoggedEvent",
    "Outcome",
    "Reward",
    "RunFilter",
    "RunLog",
    "RunRecord",
    "RunTotals",
    "StrategyId",
    "TextKind",
]
