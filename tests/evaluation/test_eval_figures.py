"""Figures are written and show something."""

from __future__ import annotations

import matplotlib.image
import numpy as np
import pytest

from kvpop_lightning.evaluation.figures import (
    busiest_stretch,
    eviction_pattern,
    kl_against_budget,
    paired_differences,
    retained_mass_by_layer,
)
from kvpop_lightning.evaluation.pictures import share_of_heads
from kvpop_lightning.evaluation.table import add_intervals, entry, refusal


@pytest.fixture(scope="module")
def table():
    result = []
    for n, policy in enumerate(["full", "streaming_llm", "kvpop_mlp", "oracle", "some_new_policy"]):
        for budget in (64, 32):
            row = {"row": 0, "kl": 0.1 * n * 64 / budget, "top1": 0.9, "nll": 1.0, "positions": 10}
            row["retained_mass"] = [[0.5 + 0.1 * n, 0.6]] * 4
            result.append(entry(policy, budget, 256, [row]))
    return result


def colours(path):
    """Distinct colours, each covering more than a few pixels."""
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).astype(int).reshape(-1, 3)
    found, count = np.unique(pixels, axis=0, return_counts=True)
    return {tuple(c) for c, n in zip(found.tolist(), count, strict=True) if n > 20}


def test_kl_against_budget_draws_every_policy(table, tmp_path):
    found = colours(kl_against_budget(table, tmp_path / "new" / "kl.png"))
    for wanted in ((0xD5, 0x5E, 0x00), (0x66, 0x66, 0x66), (0, 0, 0)):
        assert wanted in found


def test_retained_mass_has_one_panel_per_budget(table, tmp_path):
    assert (0xD5, 0x5E, 0x00) in colours(retained_mass_by_layer(table, tmp_path / "mass.png"))


def test_paired_differences_draw_points_intervals_and_who_cannot_run(tmp_path):
    def rows(*kls):
        return [
            {"row": r, "kl": kl, "top1": 0.9, "nll": 1.0, "positions": 10, "retained_mass": None}
            for r, kl in enumerate(kls)
        ]

    def drawn(name, *entries):
        table = list(entries)
        add_intervals(table)
        return paired_differences([*table, refusal("quest", 64, 256, "no room")], tmp_path / name)

    worse = entry("streaming_llm", 64, 256, rows(0.5, 0.9, 0.8))
    path = drawn("a.png", worse, entry("kvpop_mlp", 64, 256, rows(0.3, 0.4, 0.5)))
    assert {(0xD5, 0x5E, 0x00), (0x66, 0x66, 0x66)} <= colours(path)
    narrow = drawn("b.png", worse, entry("kvpop_mlp", 64, 256, rows(0.3, 0.7, 0.6)))
    grey = [
        (np.abs(matplotlib.image.imread(p)[..., :3] - 0x66 / 255) < 0.01).all(-1).sum()
        for p in (path, narrow)
    ]
    assert grey[0] > grey[1]  # the spread of the row differences is the interval's length
    assert paired_differences([worse], tmp_path / "c.png") is None  # nothing to compare with


def test_eviction_pattern_shows_the_levels_and_odd_tokens(tmp_path):
    share = np.random.default_rng(0).integers(0, 4, (6, 90)) / 3
    tokens = ["\n", " $x", "\x19", "", "  ", "word"] * 15
    path = eviction_pattern(
        {"random": share, "kvpop_mlp": share}, tokens, tmp_path / "p.png", heads=3, window=9, detail_tokens=12
    )
    assert len(colours(path)) > 4
    with pytest.raises(ValueError, match="at least one"):
        eviction_pattern({}, tokens, tmp_path / "p.png", heads=3)


def test_eviction_pattern_of_a_text_shorter_than_the_stretch(tmp_path):
    share = np.ones((2, 7))
    assert eviction_pattern({"a": share}, ["t"] * 7, tmp_path / "p.png", heads=1, sink=2, window=5).exists()


def test_the_enlarged_stretch_is_where_heads_disagree():
    share = np.zeros((4, 100))
    share[:, 80:] = 1.0
    share[::2, 40:50] = 1.0
    start = busiest_stretch(share, 10, window=20, sink=2)
    assert 36 <= start <= 44


def test_share_of_heads_counts_who_still_holds_the_token():
    eviction = np.array([[[5, 9, 99], [9, 9, 99]]])
    np.testing.assert_allclose(share_of_heads(eviction, 8), [[0.5, 1.0, 1.0]])
    np.testing.assert_allclose(share_of_heads(eviction, 1), [[1.0, 1.0, 0.0]])
