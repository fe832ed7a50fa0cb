"""Points out of a space: conditions, grids, sequences, samplers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
from sweep_cases import write

from kvpop_lightning.sweeps.checks import total_trials
from kvpop_lightning.sweeps.parts import PRUNERS, SAMPLERS, PrunerSpec
from kvpop_lightning.sweeps.sampling import build_pruner, build_sampler, laid_out_points
from kvpop_lightning.sweeps.space import Parameter, complete_point, grid_points, parse_space, suggest_point
from kvpop_lightning.sweeps.spec import load_sweep

MLSTM = {"when": {"policy": ["kvpop_mlstm"]}}
CONDITIONAL = {
    "policy.scorer.memory_dim": {"choices": [4, 8], **MLSTM},  # in front of what it depends on
    "policy": {"choices": ["kvpop_mlp", "kvpop_mlstm"]},
    "policy.scorer.delay": {"type": "int", "low": 0, "high": 8, "when": {"policy.scorer.memory_dim": 8}},
    "policy.decay": {"type": "float", "low": 0.5, "high": 1.0, "step": 0.25},
}


def parsed(body: Mapping[str, Any]) -> tuple[Parameter, ...]:
    problems: list[str] = []
    space = parse_space(body, problems)
    assert problems == []
    return space


def test_conditions_come_first_and_decide() -> None:
    space = parsed(CONDITIONAL)
    keys = [parameter.key for parameter in space]
    assert keys.index("policy") < keys.index("policy.scorer.memory_dim") < keys.index("policy.scorer.delay")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    seen = set()
    for _ in range(40):
        point = suggest_point(space, study.ask())
        assert ("policy.scorer.memory_dim" in point) == (point["policy"] == "kvpop_mlstm")
        assert ("policy.scorer.delay" in point) == (point.get("policy.scorer.memory_dim") == 8)
        seen.add(len(point))
    assert seen == {2, 3, 4}


def test_a_grid_has_every_combination_once() -> None:
    points = grid_points(parsed(CONDITIONAL))
    decays = 3
    assert len(points) == decays * (1 + 1 + 9)  # mlp; mlstm with 4; mlstm with 8 and nine delays
    assert len({tuple(sorted(point.items())) for point in points}) == len(points)
    assert {point["policy.decay"] for point in points} == {0.5, 0.75, 1.0}


def test_a_baseline_is_completed_from_the_configuration() -> None:
    space = parsed(CONDITIONAL)
    point, problems = complete_point(space, {"policy": "kvpop_mlp"}, {"policy.decay": 1})
    assert (point, problems) == ({"policy": "kvpop_mlp", "policy.decay": 1.0}, [])
    assert isinstance(point["policy.decay"], float)
    given = {"policy": "kvpop_mlp", "policy.scorer.memory_dim": 4, "policy.decay": 0.5}
    _, problems = complete_point(space, given, {})
    assert "is only there when policy" in problems[0]
    _, problems = complete_point(space, {"policy.decay": 0.5}, {})
    assert problems == ["policy is missing"]


def test_values_keep_their_type() -> None:
    flag = Parameter("policy.equal_bytes", "categorical", choices=(True, False))
    assert flag.contains(True)
    assert not flag.contains(1)
    count = Parameter("policy.budget.topk", "int", 4, 16)
    assert count.contains(16)
    assert not count.contains(16.5)
    assert not count.contains(True)


@pytest.mark.parametrize("sequence", ["sobol", "halton"])
def test_a_sequence_covers_the_space_and_goes_on_where_it_was(project: Path, sequence: str) -> None:
    write(
        project,
        sampler={"name": "qmc", "sequence": sequence, "seed": 1},
        baseline=None,
        space={
            "policy.budget.topk": {"type": "int", "low": 4, "high": 19},
            "policy.scorer.width": {"type": "int", "low": 8, "high": 128, "log": True},
            "distill.temperature": {"type": "float", "low": 0.1, "high": 10.0, "log": True},
            "distill.margin": {"choices": ["effective", "raw"]},
        },
    )
    sweep = load_sweep("mine")
    points = laid_out_points(sweep, 64)
    assert points is not None
    for parameter in sweep.space:
        assert all(parameter.contains(point[parameter.key]) for point in points)
    assert {point["policy.budget.topk"] for point in points} == set(range(4, 20))
    low = sum(point["distill.temperature"] < 1.0 for point in points)
    assert 28 <= low <= 36
    assert sum(point["distill.margin"] == "raw" for point in points) in range(28, 37)
    assert sum(point["policy.scorer.width"] < 32 for point in points) in range(26, 39)
    assert laid_out_points(sweep, 96)[:64] == points  # type: ignore[index]


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in ("grid", "qmc", "gp")])
def test_samplers_draw_new_points_for_every_ticket_and_repeat_themselves(project: Path, name: str) -> None:
    numbers = {
        "policy.decay": {"type": "float", "low": 0.5, "high": 1.0},
        "distill.temperature": {"type": "float", "low": 0.1, "high": 10.0, "log": True},
    }
    write(project, sampler={"name": name, "seed": 2}, space=numbers, baseline=None)
    sweep = load_sweep("mine")

    def draw() -> list[dict[str, Any]]:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study, points = optuna.create_study(), []
        for ticket in range(14):
            study.sampler = build_sampler(sweep, ticket)
            trial = study.ask()
            points.append(suggest_point(sweep.space, trial))
            study.tell(trial, (points[-1]["policy.decay"] - 0.8) ** 2)
        return points

    first = draw()
    assert first == draw()
    assert len({point["policy.decay"] for point in first}) == len(first)


def test_gaussian_process_finds_the_bottom(project: Path) -> None:
    space = {"policy.decay": {"type": "float", "low": 0.5, "high": 1.0}}
    write(project, sampler={"name": "gp", "startup_trials": 4}, space=space, baseline=None)
    sweep = load_sweep("mine")
    study = optuna.create_study()
    for ticket in range(9):
        study.sampler = build_sampler(sweep, ticket)
        trial = study.ask()
        study.tell(trial, (suggest_point(sweep.space, trial)["policy.decay"] - 0.8) ** 2)
    assert abs(study.best_params["policy.decay"] - 0.8) < 0.03


@pytest.mark.parametrize("name", PRUNERS)
def test_pruners_stop_what_is_clearly_worse(name: str) -> None:
    spec = PrunerSpec(name, "objective/kl", options={"startup_trials": 1} if name == "median" else {})
    pruner = build_pruner(spec, max_steps=9, every=1)
    study = optuna.create_study(pruner=pruner)
    pruned = 0
    for number in range(12):
        trial = study.ask()
        for step in range(1, 10):
            trial.report((1.0 + 0.01 * step) * (1 + number), step)
            if trial.should_prune():
                pruned += 1
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            study.tell(trial, 1.0 + number)
    assert (pruned > 0) == (name != "none")


def test_a_grid_has_no_more_trials_than_points(project: Path) -> None:
    space = {"policy.budget.topk": {"type": "int", "low": 4, "high": 12, "step": 4}}
    write(project, sampler="grid", space=space, baseline=None, trials=None)
    sweep = load_sweep("mine")
    assert (sweep.trials, total_trials(sweep, 99), total_trials(sweep, 2)) == (3, 3, 2)
    assert laid_out_points(sweep, 3) == [{"policy.budget.topk": value} for value in (4, 8, 12)]
