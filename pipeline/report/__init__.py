"""The report of a run: one self-contained page and its pictures."""

from pipeline.report.page import write_report

__all__ = ["write_report"]
