"""A run folder's files -> one page, `report.html`; nothing else is read and nothing is fetched."""

from widefield.report.page import write_report

__all__ = ["write_report"]
