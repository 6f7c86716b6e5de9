"""The report of a run: a self-contained page and its charts."""

from pipeline.report.page import write_report

__all__ = ["write_report"]
