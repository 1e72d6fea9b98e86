"""Runs from a log to one file and back, without loss: Parquet for training, JSON lines for reading.

exporting     export_runs: from a log to a file
importing     import_runs: from a file to a log
merging       merge_logs: logs of several machines become one
logged_run    a run with everything that belongs to it, and when two are the same
edit_pairs    export_edits: what people changed in memories, as preference pairs
parquet       the columns of a Parquet file (the extra `export`)
json_lines    the lines of a JSON lines file

Both kinds of file are read and written one run at a time. If the format changes so that older versions of this package
would misread them, `FORMAT_VERSION` increases.
"""

from __future__ import annotations

from memagent_graph.run_log.exchange.edit_pairs import EditReport, export_edits
from memagent_graph.run_log.exchange.exporting import ExportReport, export_runs
from memagent_graph.run_log.exchange.importing import ImportReport, import_runs
from memagent_graph.run_log.exchange.merging import is_log, merge_logs

__all__ = [
    "EditReport",
    "ExportReport",
    "ImportReport",
    "export_edits",
    "export_runs",
    "import_runs",
    "is_log",
    "merge_logs",
]
