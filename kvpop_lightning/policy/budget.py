"""The key budget of one KV head: sinks, protected window, long-range slots (METHOD.md, section 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

NEVER: int = 2**63 - 1
"""Eviction time of a key that is never evicted (the largest int64; `i < NEVER` holds for every query `i`)."""


@dataclass(frozen=True)
class Budget:
    """How many keys one KV head may hold, split by why it holds them.

    Args:
        sink: first tokens of every document, never evicted (>= 0).
        window: most recent tokens, the query's own included, never evicted (>= 1).
        topk: long-range slots that tokens compete for once they leave the window (>= 1).

    Raises:
        ValueError: a part is out of range; the message names the part and what to set.
    """

    sink: int
    window: int
    topk: int

    def __post_init__(self) -> None:
        for name, low, hint in (
            ("sink", 0, "use 0 for no sinks"),
            ("window", 1, "a query must at least see itself"),
            ("topk", 1, "use policy=streaming_llm for a cache without long-range choice"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"budget.{name} must be an integer, got {value!r}")
            if value < low:
                raise ValueError(f"budget.{name} must be at least {low}, got {value}: {hint}")

    @property
    def total(self) -> int:
        """Keys held per KV head, `sink + window + topk`."""
        return self.sink + self.window + self.topk

    def compression(self, reference_length: int) -> float:
        """`1 - total / reference_length`, the share of the reference cache that is given up."""
        return 1.0 - self.total / reference_length

    @classmethod
    def from_compression(cls, ratio: float, reference_length: int, sink: int, window: int) -> Budget:
        """The budget that gives up `ratio` of a cache of `reference_length` keys (rounded to whole keys).

        Raises:
            ValueError: `ratio` outside [0, 1), or nothing left for the long range after sinks and window.
        """
        if not 0.0 <= ratio < 1.0:
            raise ValueError(f"compression must lie in [0, 1), got {ratio}")
        total = round((1.0 - ratio) * reference_length)
        topk = total - sink - window
        if topk < 1:
            raise ValueError(
                f"compression {ratio} of {reference_length} tokens leaves {total} keys, but sink {sink} + "
                f"window {window} = {sink + window} take them all: lower budget.window or the compression"
            )
        return cls(sink, window, topk)


def checked_budget(budget: object) -> Budget:
    """`budget` itself.

    Raises:
        ValueError: something else than a `Budget`.
    """
    if not all(isinstance(getattr(budget, part, None), int) for part in ("sink", "window", "topk")):
        raise ValueError(f"budget must be Budget(sink, window, topk), got {budget!r}")
    return cast(Budget, budget)  # or what has its three numbers
