"""A sweep file is checked whole, against the schema, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sweep_cases import body, config_of, write

from kvpop_lightning.config.compose import compose
from kvpop_lightning.errors import ConfigError, UserError
from kvpop_lightning.evaluation.table import METRICS as TABLE
from kvpop_lightning.sweeps.driver import SweepRun
from kvpop_lightning.sweeps.objective import TABLE_METRICS
from kvpop_lightning.sweeps.spec import load_sweep, sweep_names

SHIPPED = ("smoke", "budget_decay_temperature", "budget_pareto", "decay_per_head", "scorer_size")


def problems(project: Path, **changes: Any) -> list[str]:
    write(project, **changes)
    with pytest.raises(ConfigError) as caught:
        load_sweep("mine")
    return caught.value.problems


def space(**entry: Any) -> dict[str, Any]:
    return {"space": {"policy.decay": {"type": "float", "low": 0.5, "high": 1.0} | entry}}


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"space": {"policy.decya": {"type": "float", "low": 0, "high": 1}}},
            ["policy.decya", "policy.decay"],
        ),
        ({"space": {"policy.budget": {"type": "int", "low": 1, "high": 2}}}, ["group", "policy.budget.topk"]),
        ({"space": {}}, ["space", "at least one"]),
        (space(low=0.0), ["policy.decay: low=0.0", "(0, 1]"]),
        (space(high=1.5), ["policy.decay: high=1.5", "(0, 1]"]),
        (space(low=0.9, high=0.6), ["low=0.9 is above high=0.6"]),
        (space(log=True, step=0.1), ["step and log"]),
        (space(log="yes"), ["log must be true or false"]),
        (space(hihg=2), ["unknown field 'hihg'", "high"]),
        (space(low="small"), ["low=small"]),
        (space(type="double"), ["type=double", "float"]),
        (space(step=-0.1), ["step=-0.1"]),
        ({"space": {"policy.budget.topk": {"type": "float", "low": 4, "high": 9}}}, ["setting is int"]),
        ({"space": {"policy.budget.topk": {"type": "int", "low": 0, "high": 9}}}, ["low=0", "at least 1"]),
        ({"space": {"policy.budget.topk": {"type": "int", "low": 1.5, "high": 9}}}, ["low=1.5", "whole"]),
        ({"space": {"distill.margin": {"choices": ["raw", "efective"]}}}, ["efective", "effective"]),
        ({"space": {"distill.margin": {"choices": []}}}, ["at least one value"]),
        ({"space": {"distill.margin": {"choices": ["raw", "raw"]}}}, ["raw is listed twice"]),
        ({"space": {"policy": {"choices": ["kvpop_mlp", "kvpop_mpl"]}}}, ["kvpop_mpl.yaml", "kvpop_mlp"]),
        ({"space": {"policy.equal_bytes": {"choices": [True, 1]}}}, ["1 is no bool"]),
        ({"space": {"policy.scorer.width": {"choices": [16, None]}}}, ["null is no int"]),
        ({"space": {"policy.scorer.width": {"choices": [16, 0]}}}, ["0 must be at least 1"]),
        ({"space": {"tracking.port": {"type": "int", "low": 1, "high": 2}}}, ["cannot be searched"]),
        ({"space": {"run_dir": {"choices": ["a"]}}}, ["cannot be searched"]),
        (space(when={"policy": ["kvpop_mlstm"]}), ["when: policy is no key of the space"]),
        ({"metrics": {"kll": "minimize"}}, ["kll", "kl"]),
        ({"metrics": {"kl": "down"}}, ["kl: down"]),
        ({"metrics": None}, ["metrics"]),
        ({"sampler": {"name": "tpee"}}, ["tpee", "tpe"]),
        ({"sampler": {"name": "tpe", "sigma": 1}}, ["tpe has no option 'sigma'"]),
        ({"sampler": "cmaes", "metrics": {"kl": "minimize", "bytes_held": "minimize"}}, ["one metric only"]),
        ({"pruner": {"name": "medain"}}, ["medain", "median"]),
        (
            {"pruner": "median", "metrics": {"kl": "minimize", "bytes_held": "minimize"}},
            ["several: use none"],
        ),
        ({"pruner": {"name": "median", "metric": "objective/bytes_held"}}, ["objective/bytes_held"]),
        ({"pruner": "wilcoxon", "objective": {"rows": 1}}, ["wilcoxon compares rows"]),
        ({"trials": 0}, ["trials=0"]),
        ({"trials": None}, ["trials: give"]),
        ({"time_limit_s": -1}, ["time_limit_s=-1"]),
        ({"rescore": {"rows": 1}}, ["rescore.rows=1", "objective.rows 2"]),
        ({"objective": {"budgets": 32}}, ["unknown field 'budgets'", "budget"]),
        ({"overrides": ["policy.decay=0.9"]}, ["policy.decay is a key of the space"]),
        ({"overrides": ["policy.decay"]}, ["key=value"]),
        ({"baseline": [3]}, ["baseline"]),
        ({"trails": 4}, ["unknown key 'trails'", "trials"]),
        ({"sampler": "grid", "baseline": None}, ["grid needs a step for policy.decay"]),
        ({"sampler": "grid"}, ["grid has all its points"]),
    ],
)
def test_each_mistake_is_one_line_that_names_it(
    project: Path, changes: dict[str, Any], parts: list[str]
) -> None:
    found = problems(project, **changes)
    line = next((line for line in found if all(part in line for part in parts)), None)
    assert line is not None, found
    assert "sweeps/mine.yaml" in line


def test_all_mistakes_come_at_once(project: Path) -> None:
    found = problems(project, trials=0, sampler="tpee", space={"policy.decya": {}, "seed": {"type": "int"}})
    assert len(found) == 4


def test_conditions_in_a_circle_and_impossible_ones(project: Path) -> None:
    def width(value: int) -> dict[str, Any]:
        return {"type": "int", "low": 8, "high": 64, "when": {"policy.scorer.memory_dim": [value]}}

    memory = {"choices": [4, 8], "when": {"policy.scorer.width": [16]}}
    names = ("policy.scorer.width", "policy.scorer.memory_dim")
    found = problems(project, space=dict(zip(names, (width(4), memory), strict=True)), baseline=None)
    assert any("circle" in line for line in found)
    memory = {"choices": [4, 8]}
    found = problems(project, space=dict(zip(names, (width(5), memory), strict=True)), baseline=None)
    assert any("never takes the value 5" in line for line in found)


@pytest.mark.parametrize(
    ("baseline", "part"),
    [
        ({"policy.budget.topk": 8, "policy.decay": 0.2}, "policy.decay=0.2 lies outside"),
        ({"policy.decay": 1.0, "policy.budget.sink": 2}, "policy.budget.sink is no key of the space"),
        ({"policy.decay": 1.0}, "policy.budget.topk=22 (the configuration's value"),
    ],
)
def test_a_baseline_point_must_lie_in_the_space(project: Path, baseline: dict[str, Any], part: str) -> None:
    write(project, baseline=[baseline])
    with pytest.raises(ConfigError) as caught:
        SweepRun(config_of("mine"))
    assert part in caught.value.problems[0]
    assert "baseline 1" in caught.value.problems[0]


def test_settings_that_clash_with_the_sweep_are_refused(project: Path) -> None:
    write(project)
    for words, part in [
        (["policy.decay=0.9"], "policy.decay is a key of the space"),
        (["data.eval_rows=3"], "rescore.rows=4"),
        (["trials=0"], "sweep.trials=0"),
        (["sweep.gpus=7"], "no GPU 7"),
    ]:
        with pytest.raises(UserError) as caught:
            SweepRun(config_of("mine", words), words)
        assert part in str(caught.value)
    write(project, pruner="median")
    with pytest.raises(ConfigError, match="frozen base"):
        SweepRun(config_of("mine", ["trainer.base=full"]), ["trainer.base=full"])


def test_a_point_that_cannot_be_is_found_before_anything_runs(project: Path) -> None:
    space = {
        "policy.budget.window": {"type": "int", "low": 4, "high": 16},
        "policy.scorer.delay": {"type": "int", "low": 0, "high": 16},
    }
    write(project, space=space, baseline=[{"policy.budget.window": 4, "policy.scorer.delay": 8}])
    with pytest.raises(ConfigError, match=r"baseline 1: policy.scorer.delay=8"):
        SweepRun(config_of("mine"))
    assert not (project / "runs").exists()


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_sweeps_are_valid(name: str) -> None:
    run = SweepRun(config_of(name))
    assert run.total >= len(run.baseline) > 0
    assert name in sweep_names()


def test_names_of_files(project: Path) -> None:
    with pytest.raises(UserError, match="did you mean smoke"):
        load_sweep("smok")
    with pytest.raises(UserError, match="no such file"):
        load_sweep("away.yaml")
    with pytest.raises(UserError, match="kvpop sweep NAME"):
        SweepRun(compose([], command="sweep"))
    path = write(project, "other")
    assert load_sweep(str(path)).name == "other"
    assert not any(name.startswith("ablation") for name in sweep_names())


def test_metrics_are_fields_of_the_table() -> None:
    assert {name for name, _, _ in TABLE} <= set(TABLE_METRICS)


def test_the_file_comes_before_the_command_line(project: Path) -> None:
    write(project, overrides=body()["overrides"] + ["trainer.max_steps=7", "seed=4"])
    config = config_of("mine", ["seed=5"])
    assert (config.trainer.max_steps, config.seed, config.experiment) == (7, 5, "smoke")
    assert config.run_dir == "runs/sweeps/mine"
