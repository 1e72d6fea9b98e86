"""The log of runs: exactly what the policy saw and wrote, in one SQLite file that many processes may write to.

records       its contents as data: runs, conversations, events, rewards; which runs are chosen, and their totals
columns       how their fields are stored, in tables and in Parquet files
packing       token ids, log-probs and texts as small blobs
rows          the tables, connections to the file, and the statements that change it
writer        one thread per log that commits the entries of many reads
log           RunLog: write, query, reward, delete
logged_trace  a run's trace from its conversations
recording     one run's interface to it, for the graph's steps
exchange      runs as Parquet files and back, and several logs as one
"""

from __future__ import annotations

from memagent_graph.run_log.log import RunLog
from memagent_graph.run_log.records import (
    Conversation,
    LoggedEvent,
    Outcome,
    Reward,
    RunFilter,
    RunRecord,
    RunTotals,
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
