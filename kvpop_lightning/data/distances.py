"""How far back a solution reaches: tokens from the statement of a fact to each use (docs/data.md)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpop_lightning.data.chat import ChatRenderer
from kvpop_lightning.data.problem import Problem, Span


@dataclass(frozen=True)
class Reach:
    """One use of one fact. `distance`: tokens back to where the fact was stated. `gap`: tokens back to where
    its value was last repeated, which is what a cache must at least bridge."""

    fact: str
    given: bool
    distance: int
    gap: int


def fact_distances(problem: Problem, renderer: ChatRenderer) -> list[Reach]:
    """Reach of every use of every fact, in tokens of the rendered document."""
    rendered = renderer(problem.messages)
    starts = dict(zip(("question", "solution"), (start for start, _ in rendered.contents), strict=True))

    def token(span: Span) -> int:
        return int(np.searchsorted(rendered.offsets[:, 0], starts[span.part] + span.start, side="right")) - 1

    reaches = []
    for fact in problem.facts:
        stated = last = token(fact.stated)
        for use in sorted(map(token, fact.uses)):
            reaches.append(Reach(fact.name, fact.given, use - stated, use - last))
            last = use
    return reaches
