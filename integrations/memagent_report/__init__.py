"""Reports over many documents: a matrix of answers with quotes, and sections in which every sentence cites quotes."""

from __future__ import annotations

from memagent_report.checked_report import Report
from memagent_report.reporting import ReportSource, areport, report

__all__ = ["Report", "ReportSource", "areport", "report"]
