"""Averages over rows and paired intervals of the differences between two policies (METHOD.md, section 7).

Rows are the unit of replication: positions of one text are far from independent. Two policies are compared
on the same rows, so the interval is that of the mean of the row differences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of the finite values; None when there is none."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b), by Lentz's continued fraction."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1.0) / (a + b + 2.0):  # the fraction converges fast only on this side
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(1.0 - (a + b) * x / (a + 1.0), tiny)
    result = d
    for m in range(1, 400):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        before = result
        for term in (even, odd):
            d = 1.0 / (1.0 + term * d or tiny)
            c = 1.0 + term / c or tiny
            result *= d * c
        if abs(result - before) < 1e-15 * abs(result):
            break
    return front * result / a


def student_t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution; `probability` in [0.5, 1), `degrees` >= 1 degrees of freedom."""
    assert 0.5 <= probability < 1.0
    assert degrees >= 1

    def upper_tail(t: float) -> float:
        return 0.5 * _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))

    low, high = 0.0, 1.0
    while upper_tail(high) > 1.0 - probability:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2
        if upper_tail(middle) > 1.0 - probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True)
class PairedInterval:
    """Mean difference over the common rows with two intervals of it; None where rows are too few."""

    difference: float
    low: float | None
    """Lower end of the Student t interval of the mean difference."""
    high: float | None
    bootstrap_low: float | None
    """Lower end of the percentile bootstrap over rows (narrower than it should be with few rows)."""
    bootstrap_high: float | None
    rows: int
    level: float

    def to_dict(self) -> dict[str, float | int | None]:
        return asdict(self)


def paired_interval(
    first: Sequence[float], second: Sequence[float], *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> PairedInterval:
    """Interval of the mean of `first - second`, rows paired.

    Args:
        first, second: one value per row, same rows in the same order.
        level: coverage, 0.95 = 95 %.
        draws: bootstrap resamples of the rows.

    Raises:
        ValueError: different numbers of rows, or none.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"paired rows needed: got {len(first)} and {len(second)} values")
    difference = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    centre, rows = float(difference.mean()), len(difference)
    if rows < 2:
        return PairedInterval(centre, None, None, None, None, rows, level)
    half = student_t_quantile((1 + level) / 2, rows - 1) * float(difference.std(ddof=1)) / math.sqrt(rows)
    picks = np.random.default_rng(seed).integers(0, rows, size=(draws, rows))
    low, high = np.quantile(difference[picks].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return PairedInterval(centre, centre - half, centre + half, float(low), float(high), rows, level)
