"""A run folder's files, or a comparison's -> one page, `report.html`; nothing else is read and nothing is fetched."""

from widefield.report.bench import write_bench
from widefield.report.page import write_report

__all__ = ["write_bench", "write_report"]
