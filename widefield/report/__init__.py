"""From the files of a run folder, or of a comparison, to one self-contained page, `report.html`."""

from widefield.report.bench import write_bench
from widefield.report.page import write_report

__all__ = ["write_bench", "write_report"]
