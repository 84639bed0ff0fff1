"""A case of a rule as a module, for whoever captures or wraps it."""

from __future__ import annotations

from torch import Tensor, nn

from widefield.rules import RuleCase


class CaseModule(nn.Module):
    """A case whose tiled inputs are given to forward and whose plain ones are parameters."""

    def __init__(self, case: RuleCase, wholes: list[Tensor]) -> None:
        super().__init__()
        self.case = case
        self.plain = nn.ParameterDict({str(n): x.clone() for n, x in enumerate(wholes) if n not in case.tiled})

    def forward(self, *images: Tensor):
        given = iter(images)
        numbers = range(len(self.case.shapes))
        return self.case.run(*(next(given) if n in self.case.tiled else self.plain[str(n)] for n in numbers))
