"""The log of runs: all prompts and completions, in one SQLite file that many processes may write to.

records       the contents as data: runs, conversations, events, rewards; filters, totals, the trace of a run
tables        the storage of records: columns, blobs, the tables, and the statements that change them
log           RunLog: write, query, reward, delete
exchange      runs as Parquet files and back, and several logs as one
"""

from __future__ import annotations

from memagent_graph.run_log.log import RunLog as RunLog
from memagent_graph.run_log.records import Conversation as Conversation
from memagent_graph.run_log.records import LoggedEvent as LoggedEvent
from memagent_graph.run_log.records import LoggedRun as LoggedRun
from memagent_graph.run_log.records import Outcome as Outcome
from memagent_graph.run_log.records import Reward as Reward
from memagent_graph.run_log.records import RunFilter as RunFilter
from memagent_graph.run_log.records import RunRecord as RunRecord
from memagent_graph.run_log.records import RunTotals as RunTotals
from memagent_graph.run_log.records import TextKind as TextKind
