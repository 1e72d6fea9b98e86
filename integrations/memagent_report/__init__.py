"""Reports over many documents: a matrix of answers with quotes, and sections in which every sentence cites quotes."""

from __future__ import annotations

from memagent_report.report_data import Report
from memagent_report.reporting import areport, report

__all__ = ["Report", "areport", "report"]
