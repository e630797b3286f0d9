"""The report of a run: sentences, figures, one page that opens from disk. It never sees a model or a text."""

from __future__ import annotations

from theodolite.report.page import write_report
from theodolite.report.summary import Finding, summarise

__all__ = ["Finding", "summarise", "write_report"]
