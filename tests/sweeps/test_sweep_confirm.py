"""The winner over several seeds: which trainings, and what their differences say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sweep_cases import write

from kvpop_lightning.errors import ConfigError
from kvpop_lightning.sweeps.confirm import Measured, arms_of, conclusion, headlines, trainings
from kvpop_lightning.sweeps.spec import load_sweep

WINNER: dict[str, Any] = {"point": {"policy.decay": 0.7, "policy.budget.topk": 8}, "baseline": False}
BASELINE: dict[str, Any] = {"point": {"policy.decay": 1.0, "policy.budget.topk": 9}, "baseline": True}
WITHOUT = {"policy.decay": 1.0}


def test_the_winner_meets_the_baseline_and_itself_without_what_is_in_question() -> None:
    arms = arms_of([WINNER, BASELINE], WITHOUT)
    assert list(arms) == ["best", "baseline", "best with policy.decay=1.0"]
    assert arms["best with policy.decay=1.0"] == {"policy.decay": 1.0, "policy.budget.topk": 8}
    keys = {training.key for training in trainings(arms, [0, 1])}
    assert len(keys) == 6
    assert all("/" not in key and " " not in key for key in keys)


def test_a_winner_without_rivals_needs_no_confirmation() -> None:
    assert arms_of([], WITHOUT) == {}
    assert arms_of([BASELINE], WITHOUT) == {}


def test_differences_are_paired_by_row_after_averaging_the_seeds() -> None:
    rows = {
        ("best", 0): [1.0, 2.0],
        ("best", 1): [1.2, 2.2],
        ("baseline", 0): [2.0, 3.1],
        ("baseline", 1): [2.2, 3.3],
    }
    arms = {"best": WINNER["point"], "baseline": BASELINE["point"]}
    content = conclusion(
        arms, [0, 1], "kl", lambda arm, seed: Measured(sum(rows[arm, seed]) / 2, rows[arm, seed])
    )
    (difference,) = content["differences"]
    assert difference["interval"]["rows"] == 2  # two texts, however many seeds
    assert difference["interval"]["difference"] == pytest.approx(-1.05)
    assert [one["difference"] for one in difference["by_seed"]] == pytest.approx([-1.05, -1.05])
    assert "over 2 seeds on 2 rows" in headlines(content)[0]


def test_a_seed_that_failed_is_left_out_of_both_sides() -> None:
    arms = {"best": WINNER["point"], "baseline": BASELINE["point"]}
    content = conclusion(
        arms,
        [0, 1],
        "kl",
        lambda arm, seed: None if (arm, seed) == ("best", 1) else Measured(1.0 + seed, [1.0, 1.0]),
    )
    assert [one["seed"] for one in content["differences"][0]["by_seed"]] == [0]


@pytest.mark.parametrize(
    ("confirm", "message"),
    [
        ({"without": {"policy.decai": 1.0}}, "policy.decai is no key of the space"),
        ({"without": {"policy.decay": 2.0}}, "lies outside the space"),
        ({"seeds": 0}, "confirm.seeds=0"),
    ],
)
def test_a_wrong_confirmation_is_refused(project: Path, confirm: dict[str, Any], message: str) -> None:
    write(project, confirm=confirm)
    with pytest.raises(ConfigError, match=message):
        load_sweep("mine")
