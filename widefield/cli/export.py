"""`widefield export`: a run's model in a file of its own."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from widefield.cli._arguments import add_weights, given_text

ORDER = 40
SUMMARY = "write a run's model for use elsewhere"
HELP = """\
Write a run's model for use without widefield.

  widefield export runs/0001 --to safetensors            names and shapes of the plain model
  widefield export runs/0001 --to state_dict             for torch.load(..., weights_only=True)
  widefield export runs/0001 --to onnx --output net.onnx
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR")
    parser.add_argument("--to", default="safetensors", metavar="FORMAT", help="safetensors, state_dict or onnx")
    parser.add_argument("--output", type=given_text, metavar="FILE", help="where to; model.* in the run folder if left out")
    add_weights(parser, default="best, where the run has them,")


def run(options: Namespace) -> int:
    from widefield.inference import export

    output = Path(options.output) if options.output else None
    print(export(Path(options.run), options.to, output=output, weights=options.weights, trust=options.trust))
    return 0


CASES: list[tuple[list[str], dict[str, Any] | str]] = [
    (["runs/a"], {"run": "runs/a", "to": "safetensors", "output": None, "weights": None}),
    (["runs/a", "--to", "onnx", "--output", "net.onnx"], {"to": "onnx", "output": "net.onnx"}),
    (["runs/a", "--output", ""], "it is empty; give it a value"),
]
