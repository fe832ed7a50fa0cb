"""Whole ablations with a child that trains nothing, and their tables."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from sweep_cases import FAKE
from test_ablation_grid import body, write

from kvpop_lightning import cli
from kvpop_lightning.config.compose import compose
from kvpop_lightning.evaluation.statistics import paired_interval
from kvpop_lightning.sweeps import ablation as ablations
from kvpop_lightning.sweeps import trial as trials
from kvpop_lightning.sweeps.ablation import AblationOutcome, run_ablation
from kvpop_lightning.sweeps.ablation_figure import draw
from kvpop_lightning.sweeps.ablation_points import expected_seconds, points_of
from kvpop_lightning.sweeps.ablation_screen import AblationScreen
from kvpop_lightning.sweeps.ablation_table import build_table, compare
from kvpop_lightning.sweeps.ablation_text import markdown, terminal_tables
from kvpop_lightning.sweeps.grid import load_grid, words_of_grid

FOLDER = Path("runs/ablations/mine")
ONE_BUDGET = {"budgets": [32], "rows": 3, "metrics": ["kl"]}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablations, "LOOK_S", 0.05)


def go(words: list[str] | None = None, plan: dict[str, list[str]] | None = None) -> AblationOutcome:
    os.environ["FAKE_PLAN"] = json.dumps(plan or {})
    given = ["ablate.name=mine", "workers=2", "grace_s=1", *(words or [])]
    config = compose([*words_of_grid("mine"), *given], command="ablate")
    return run_ablation(config, given, command=FAKE)


def attempts() -> dict[str, int]:
    return {p.parent.name: int(p.read_text()) for p in FOLDER.glob("points/*/attempts")}


def test_a_grid_runs_once_and_is_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    write(objective=ONE_BUDGET)
    outcome = go()
    assert (outcome.ran, outcome.reused, outcome.failures) == (8, 0, [])
    assert len(attempts()) == 8
    cells = {cell["label"]: cell for cell in outcome.table["cells"]}
    found = cells["decay=off scorer=mlp"]["results"][0]["versus_default"]["kl"]
    # The stand-in's KL is (decay - 0.8)^2 + ..., read from the point, which an ablation leaves empty.
    assert found["difference"] == 0
    assert found["pairs"] == 6
    assert "versus_default" in cells["decay=on scorer=mlp"]["results"][0]
    assert json.loads((FOLDER / "ablation.json").read_text()) == json.loads(json.dumps(outcome.table))
    assert "| off | linear | " in (FOLDER / "ablation.md").read_text()
    assert (FOLDER / "ablation.png").stat().st_size > 5000
    again = go()
    assert (again.ran, again.reused) == (0, 8)
    assert set(attempts().values()) == {1}
    assert "8 points, 8 finished before" in capsys.readouterr().out


def test_only_what_changed_runs_again() -> None:
    write(objective=ONE_BUDGET)
    go()
    axes = body()["axes"]
    axes["scorer"]["linear"] = {"policy": "kvpop_linear", "trainer.scorer_lr": 0.01}
    write(objective=ONE_BUDGET, axes=axes)
    outcome = go()
    assert (outcome.ran, outcome.reused) == (4, 4)
    assert sorted(name for name, count in attempts().items() if count == 2) == [
        f"{decay}-linear-seed{seed}" for decay in ("off", "on") for seed in (0, 1)
    ]


def test_one_failing_point_is_shown_and_loses_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    write(objective=ONE_BUDGET)
    bad = "decay=off scorer=linear seed=1"
    outcome = go(plan={bad: ["crash"], "decay=on scorer=linear seed=0": ["crash", "ok"]})
    assert outcome.failures == [f"{bad}: failed: RuntimeError: something broke"]
    assert attempts()["off-linear-seed1"] == 2, "a crash is tried again"
    states = {cell["label"]: cell["state"] for cell in outcome.table["cells"]}
    assert states.pop("decay=off scorer=linear") == "partly finished"
    assert set(states.values()) == {"finished"}
    text = capsys.readouterr().out
    assert "Traceback: the last words" in text
    mended = go()
    assert (mended.ran, mended.reused, mended.failures) == (1, 7, [])


def test_a_wrong_setting_is_not_tried_again() -> None:
    write(objective=ONE_BUDGET)
    outcome = go(["only=decay=off scorer=mlp"], plan={"*": ["invalid"]})
    assert set(attempts().values()) == {1}
    assert len(outcome.failures) == 2
    cell = next(c for c in outcome.table["cells"] if c["label"] == "decay=off scorer=mlp")
    assert (cell["state"], cell["reason"]) == ("failed", "policy.budget.topk=1: too small")
    assert outcome.figure is None


def test_a_part_of_the_grid_shows_the_rest_as_not_run() -> None:
    write(
        objective=ONE_BUDGET,
        constraints=[{"when": {"scorer": "linear", "decay": False}, "reason": "too dull"}],
    )
    outcome = go(["only=scorer=mlp"])
    assert outcome.ran == 4
    assert [cell["state"] for cell in outcome.table["cells"]] == [
        "finished",
        "not run",
        "finished",
        "left out",
    ]
    text = markdown(outcome.table)
    assert "left out: too dull" in text
    rest = go()
    assert (rest.ran, rest.reused) == (2, 4)


def test_ctrl_c_stops_the_points_and_keeps_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    write(objective=ONE_BUDGET)
    looks = iter(range(10**6))
    real_sleep = time.sleep

    def interrupted(seconds: float) -> None:
        real_sleep(seconds)
        if next(looks) == 30:
            raise KeyboardInterrupt

    monkeypatch.setattr(ablations, "time", SimpleNamespace(sleep=interrupted))  # of the main thread alone
    with pytest.raises(KeyboardInterrupt):
        go(plan={"*": ["slow"], "decay=on scorer=mlp seed=0": ["ok"]})
    table = json.loads((FOLDER / "ablation.json").read_text())
    assert table["cells"][0]["state"] == "partly finished"
    assert not list(FOLDER.glob("points/*/child.json")), "no process is left"
    monkeypatch.setattr(ablations, "time", time)
    outcome = go()
    assert (outcome.ran, outcome.reused) == (7, 1)


def test_list_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    write(objective=ONE_BUDGET)
    assert cli.main(["ablate", "mine", "--list", "--only", "scorer=mlp", "--only", "decay=off"]) == 0
    text = capsys.readouterr().out
    assert "decay=off scorer=mlp: seed 0 to run, seed 1 to run" in text
    assert "decay=on scorer=mlp: not selected" in text
    assert "2 points, 0 finished before" in text
    assert not FOLDER.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ablate"], "which ablation"),
        (["ablate", "mine", "--only"], "--only needs a value"),
        (["ablate", "mine", "--only", "x=y"], "AXIS=LEVEL"),
    ],
)
def test_the_command_line_says_what_is_wrong(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(objective=ONE_BUDGET)
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def record(kl: list[float], **more: list[float]) -> dict[str, Any]:
    rows = {"kl": kl, **{name.replace("at", "kl@"): value for name, value in more.items()}}
    return {
        "state": trials.FINISHED,
        "message": "",
        "values": {name: sum(value) / len(value) for name, value in rows.items()},
        "rows": rows,
        "seconds": 2.0,
        "run_id": None,
    }


def test_differences_are_paired_over_rows_and_seeds() -> None:
    default = {0: record([1.0, 2.0, 3.0]), 1: record([1.1, 2.1, 3.1])}
    first = {0: record([0.9, 1.9, 2.7]), 1: record([0.9, 1.9, 2.9]), 2: record([9.0, 9.0, 9.0])}
    found = compare(first, default, "kl")
    assert found is not None
    pairs = [-0.1, -0.1, -0.3, -0.2, -0.2, -0.2]
    expected = paired_interval(pairs, [0.0] * 6)
    assert found["difference"] == pytest.approx(expected.difference)
    assert [found["low"], found["high"]] == pytest.approx([expected.low, expected.high])
    rows = paired_interval([-0.15, -0.15, -0.25], [0.0] * 3)
    assert [found["row_low"], found["row_high"]] == pytest.approx([rows.low, rows.high])
    assert found["by_seed"] == pytest.approx([-0.5 / 3, -0.2])
    assert found["clear"] is True


def test_a_difference_is_clear_only_when_rows_and_seeds_agree() -> None:
    base = record([0.0] * 4)
    opposite = {0: record([0.5, 0.5, 0.5, 0.6]), 1: record([-0.1, -0.1, -0.1, -0.1])}
    found = compare(opposite, {0: base, 1: base}, "kl")
    assert found is not None
    assert not found["clear"]
    one_row = compare({0: record([1.0])}, {0: record([0.5])}, "kl")
    assert one_row is not None
    assert (one_row["low"], one_row["clear"]) == (None, False)
    assert compare({0: record([1.0, float("nan")])}, {0: record([1.0, 1.0])}, "kl") is None
    assert compare({0: record([1.0])}, {1: record([1.0])}, "kl") is None


def test_the_table_has_every_budget(tmp_path: Path) -> None:
    grid = load_grid(write())
    labels = [cell.label for cell in grid.cells]
    records = {
        (label, seed): record([i + 0.1 * seed, i + 0.2, i + 0.1], at24=[2.0 * i, 2.0 * i, 2.0 * i])
        for i, label in enumerate(labels)
        for seed in (0, 1)
    }
    del records[labels[3], 1]
    table = build_table(grid, records)
    cell = table["cells"][2]
    assert [result["budget"] for result in cell["results"]] == [32, 24]
    assert cell["results"][0]["versus_default"]["kl"]["difference"] == pytest.approx(2.0)
    assert cell["results"][1]["versus_default"]["kl"]["difference"] == pytest.approx(4.0)
    assert table["cells"][0]["results"][0]["versus_default"] == {}
    assert table["cells"][3]["state"] == "partly finished"
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for part in terminal_tables(table):
        console.print(part)
    text = console.export_text()
    assert "+4.0000 [+4.0000, +4.0000] *" in text
    assert "kl, 24 keys" in markdown(table)
    assert draw(table, tmp_path / "a.png") == tmp_path / "a.png"


def test_the_estimate_follows_the_nearest_points() -> None:
    grid = load_grid(write())
    points = points_of(grid, [], FOLDER)
    known = {("a", 0): (grid.cells[0], 10.0), ("b", 0): (grid.cells[1], 40.0)}  # mlp 10 s, linear 40 s
    by_key = {point.key: point for point in points}
    assert expected_seconds(by_key["decay=off scorer=mlp", 0], {}) is None
    assert expected_seconds(by_key["decay=off scorer=mlp", 0], known) == 10.0
    assert expected_seconds(by_key["decay=off scorer=linear", 0], known) == 40.0
    chosen = [by_key["decay=off scorer=mlp", 0], by_key["decay=off scorer=linear", 1]]
    screen = AblationScreen("mine", chosen, known, 1)
    assert screen.seconds_left() == pytest.approx(50.0)
    assert AblationScreen("mine", chosen, known, 2).seconds_left() == pytest.approx(25.0)
    assert AblationScreen("mine", chosen, {}, 1).seconds_left() is None
