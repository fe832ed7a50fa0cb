"""Does the winner's gain repeat? It, the baseline, and it without what is in question, with further seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpop_lightning.evaluation.statistics import paired_interval
from kvpop_lightning.sweeps.space import Point

BEST, BASELINE = "best", "baseline"


@dataclass(frozen=True)
class Training:
    """One arm trained with one seed."""

    arm: str
    seed: int
    point: Point

    @property
    def key(self) -> str:
        """Names it in the study and on disk; another point is another training."""
        values = "-".join(str(value) for _, value in sorted(self.point.items()))
        return f"{self.arm}-seed{self.seed}-{values}".replace("/", "_").replace(" ", "")


@dataclass(frozen=True)
class Measured:
    """An arm's mean over the rows, and each row, in the metric that is minimised or maximised."""

    value: float
    rows: list[float]


def arms_of(entries: Sequence[Mapping[str, Any]], without: Point) -> dict[str, Point]:
    """The points to compare, the winner first; empty when there is nothing to compare it with.

    Args:
        entries: of `best.rescore`, best first.
        without: values that take the winner's place in the third arm, as in `{policy.decay: 1.0}`.
    """
    if not entries:
        return {}
    winner = dict(entries[0]["point"])
    arms = {BEST: winner}
    baseline = next((dict(entry["point"]) for entry in entries if entry["baseline"]), None)
    if baseline is not None and baseline != winner:
        arms[BASELINE] = baseline
    plain = winner | without
    if without and plain != winner:
        arms[without_name(without)] = plain
    return arms if len(arms) > 1 else {}


def without_name(without: Point) -> str:
    return "best with " + ", ".join(f"{key}={value}" for key, value in without.items())


def trainings(arms: Mapping[str, Point], seeds: Iterable[int]) -> list[Training]:
    return [Training(arm, seed, dict(point)) for seed in seeds for arm, point in arms.items()]


def conclusion(
    arms: Mapping[str, Point], seeds: Sequence[int], metric: str, found: Callable[[str, int], Measured | None]
) -> dict[str, Any]:
    """`confirmed.json`: every arm's values by seed, and the winner's paired difference to each other arm.

    A row under two seeds is one text: its differences are averaged over the seeds first, and the interval is
    that over rows.

    Args:
        found: an arm's measurement with a seed; None = it failed, and the seed is left out of comparisons.
    """
    measured = {(arm, seed): found(arm, seed) for arm in arms for seed in seeds}
    content: dict[str, Any] = {
        "metric": metric,
        "seeds": list(seeds),
        "arms": [
            {
                "name": arm,
                "point": dict(point),
                "by_seed": [
                    {"seed": seed, "value": one.value, "rows": one.rows}
                    for seed in seeds
                    if (one := measured[arm, seed]) is not None
                ],
            }
            for arm, point in arms.items()
        ],
        "differences": [],
    }
    for arm in arms:
        pairs = {
            seed: (best, other)
            for seed in seeds
            if arm != BEST
            and (best := measured[BEST, seed]) is not None
            and (other := measured[arm, seed]) is not None
        }
        if not pairs:
            continue
        count = min(len(m.rows) for pair in pairs.values() for m in pair)
        of_best, of_other = (
            [sum(pair[side].rows[row] for pair in pairs.values()) / len(pairs) for row in range(count)]
            for side in (0, 1)
        )
        content["differences"].append(
            {
                "best_minus": arm,
                "interval": paired_interval(of_best, of_other).to_dict(),
                "by_seed": [{"seed": s, "difference": b.value - o.value} for s, (b, o) in pairs.items()],
            }
        )
    return content


def headlines(content: Mapping[str, Any]) -> list[str]:
    """`kl: best - baseline = -0.02 [-0.03, -0.01] over 2 seeds, 8 rows (seed 0: -0.021, seed 1: -0.019)`."""
    lines = []
    for entry in content["differences"]:
        interval = entry["interval"]
        ends = "" if interval["low"] is None else f" [{interval['low']:+.4g}, {interval['high']:+.4g}]"
        each = ", ".join(f"seed {one['seed']}: {one['difference']:+.4g}" for one in entry["by_seed"])
        lines.append(
            f"{content['metric']}: best - {entry['best_minus']} = {interval['difference']:+.4g}{ends} over "
            f"{len(entry['by_seed'])} seeds on {interval['rows']} rows ({each})"
        )
    return lines
