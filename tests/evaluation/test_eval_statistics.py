"""Paired intervals against scipy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from kvpop_lightning.evaluation.statistics import mean, paired_interval, student_t_quantile


@pytest.mark.parametrize("degrees", [1, 2, 3, 7, 30, 500])
@pytest.mark.parametrize("probability", [0.5, 0.8, 0.975, 0.9995])
def test_t_quantile_equals_scipy(probability, degrees):
    expected = scipy.stats.t.ppf(probability, degrees)
    assert student_t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("rows", [2, 4, 11])
def test_paired_interval_equals_scipy(rows):
    rng = np.random.default_rng(rows)
    second = rng.gamma(2.0, size=rows)
    first = second + 0.2 + 0.1 * rng.standard_normal(rows)
    got = paired_interval(first.tolist(), second.tolist(), level=0.9)
    expected = scipy.stats.ttest_rel(first, second).confidence_interval(0.9)
    assert got.difference == pytest.approx((first - second).mean())
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert got.bootstrap_low <= got.difference <= got.bootstrap_high
    unpaired = scipy.stats.ttest_ind(first, second).confidence_interval(0.9)
    assert got.high - got.low < 0.7 * (unpaired.high - unpaired.low)  # the rows differ among themselves


def test_bootstrap_covers_like_scipy():
    rng = np.random.default_rng(3)
    first, second = rng.normal(0.3, 1, 40), np.zeros(40)
    got = paired_interval(first.tolist(), second.tolist(), draws=20000)
    boot = scipy.stats.bootstrap(
        (first,), np.mean, method="percentile", rng=rng, n_resamples=20000
    ).confidence_interval
    assert (got.bootstrap_low, got.bootstrap_high) == pytest.approx((boot.low, boot.high), abs=0.03)


def test_one_row_has_a_difference_but_no_interval():
    got = paired_interval([0.5], [0.2])
    assert got.difference == pytest.approx(0.3)
    assert got.low is got.high is got.bootstrap_low is None


def test_unpaired_rows_are_refused():
    with pytest.raises(ValueError, match="paired rows"):
        paired_interval([1.0, 2.0], [1.0])


def test_mean_skips_what_is_undefined():
    assert mean([1.0, None, float("nan"), 3.0]) == 2.0
    assert mean([None, float("nan")]) is None
