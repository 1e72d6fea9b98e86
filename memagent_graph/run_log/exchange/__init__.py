"""Runs from a log to one Parquet file and back, and from several logs to one, without loss.

exporting   export_runs: from a log to a file
importing   import_runs, merge_logs: from a file, or from other logs, to a log
logged_run  a run of a log with everything that belongs to it, and what several logs have of one, put together
parquet     the columns of a file (the extra `export`)

One run at a time is in memory.
"""

from __future__ import annotations

from memagent_graph.run_log.exchange.exporting import ExportReport, export_runs
from memagent_graph.run_log.exchange.importing import ImportReport, import_runs, is_log, merge_logs

__all__ = ["ExportReport", "ImportReport", "export_runs", "import_runs", "is_log", "merge_logs"]
