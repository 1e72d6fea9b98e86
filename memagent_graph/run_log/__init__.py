"""The log of runs: what the policy saw and said, exactly, in one SQLite file that many processes write to.

schema      connections, and the version of a file's tables
migration   the tables, and how a file of an older version gets them
edits       who replaced a memory
records     what is in it, as data: runs, conversations, events, rewards
packing     token ids, log-probs and texts as small blobs
writer      one thread per log that commits what many reads hand in
log         RunLog: write, query, reward, delete
filters     which runs are meant, and what they come to
logged_trace  a run's trace from its conversations
rows        between records and the tables' rows
recording   one run's side of it: what the graph's steps call
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
