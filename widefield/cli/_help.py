"""How help texts are laid out: prose as wide as the terminal, examples on lines of their own."""

from __future__ import annotations

import re
import textwrap
from argparse import HelpFormatter


class HelpLayout(HelpFormatter):
    """Fills paragraphs of prose to the terminal's width and keeps indented lines.

    The explanation behind an example, after three spaces or more, goes on a line of its own where the two do not fit.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(_laid_out(block, width) for block in text.strip().split("\n\n"))


def _laid_out(block: str, width: int) -> str:
    lines = block.splitlines()
    if not lines[0].startswith(" "):
        return textwrap.fill(" ".join(line.strip() for line in lines), width, break_on_hyphens=False, break_long_words=False)
    return "\n".join(part for line in lines for part in _parts_of(line, width))


def _parts_of(line: str, width: int) -> list[str]:
    """An example in one line, or in two: the command and its explanation, or the command broken behind a backslash."""
    if len(line) <= width:
        return [line]
    command, *explanation = re.split(r"(?<=\S) {3,}(?=\S)", line, maxsplit=1)
    further = [textwrap.fill(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6) for text in explanation]
    words = re.findall(r"(?:'[^']*'|\S)+", command)  # what is quoted stays in one piece
    if len(command) > width and len(words) > 2:
        indent = command[: len(command) - len(command.lstrip())]
        fits = [n for n in range(2, len(words)) if len(indent + " ".join(words[:n])) <= width - 2] or [1]
        first, rest = words[: fits[-1]], words[fits[-1] :]
        return [f"{indent}{' '.join(first)} \\", *_parts_of(f"      {' '.join(rest)}", width), *further]
    return [command, *further]
