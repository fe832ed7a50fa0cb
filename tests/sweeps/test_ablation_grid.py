"""Ablation files: cells, constraints, and everything that may be wrong with one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpop_lightning.config.compose import compose
from kvpop_lightning.errors import ConfigError, UserError
from kvpop_lightning.sweeps.ablation_points import own_words, points_of
from kvpop_lightning.sweeps.grid import grid_names, load_grid, words_of_grid
from kvpop_lightning.sweeps.spec import sweep_names

SHIPPED = ["aggregation_scorer", "base", "decay", "inputs", "loss", "scorer_size", "smoke", "target"]


def body(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "experiment": "smoke",
        "overrides": ["tracking.enabled=false", "data.eval_rows=4"],
        "axes": {
            "decay": {True: {"policy.decay": 0.7}, False: {"policy.decay": 1.0}},
            "scorer": {"mlp": {"policy": "kvpop_mlp"}, "linear": {"policy": "kvpop_linear"}},
        },
        "seeds": [0, 1],
        "objective": {"budgets": [32, 24], "rows": 3, "metrics": ["kl"]},
    }
    content |= changes
    return {key: value for key, value in content.items() if value is not None}


def write(**changes: Any) -> str:
    path = Path("sweeps/ablation_mine.yaml")
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(body(**changes), sort_keys=False))
    return "mine"


def problems(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_grid(write(**changes))
    return caught.value.problems


def test_cells_of_both_designs() -> None:
    grid = load_grid(write(default={"decay": False}))
    assert [cell.label for cell in grid.cells] == [
        "decay=off scorer=mlp",
        "decay=on scorer=mlp",
        "decay=on scorer=linear",
        "decay=off scorer=linear",
    ]
    assert grid.cells[1].words == ("policy.decay=0.7", "policy=kvpop_mlp")
    assert grid.budgets == [32, 24]
    star = load_grid(write(design="one_at_a_time"))
    assert [cell.label for cell in star.cells] == [
        "decay=on scorer=mlp",
        "decay=off scorer=mlp",
        "decay=on scorer=linear",
    ]


def test_constraints_leave_cells_out_with_their_reason() -> None:
    grid = load_grid(
        write(constraints=[{"when": {"scorer": "linear", "decay": False}, "reason": "too dull"}])
    )
    assert [cell.excluded for cell in grid.cells] == ["", "", "", "too dull"]
    assert len(points_of(grid, [], Path("run"))) == 6


def test_only_chooses_cells() -> None:
    grid = load_grid(write())
    assert [c.label for c in grid.select("scorer=linear")] == [
        "decay=on scorer=linear",
        "decay=off scorer=linear",
    ]
    assert [c.label for c in grid.select("scorer=linear decay=off,on")] == [
        c.label for c in grid.select("scorer=linear")
    ]
    assert [c.label for c in grid.select("scorer=linear,mlp decay=off")] == [
        "decay=off scorer=mlp",
        "decay=off scorer=linear",
    ]
    for wrong, said in (
        ("scorr=mlp", "did you mean scorer"),
        ("scorer=mpl", "known: mlp, linear"),
        ("mlp", "AXIS=LEVEL"),
    ):
        with pytest.raises(UserError, match=said):
            grid.select(wrong)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"axis": {}}, "unknown key 'axis'"),
        ({"axes": {}}, "axes: name at least one"),
        ({"axes": {"a": {"x": {"policy.decai": 1}}}}, "axes: a: x: unknown key"),
        (
            {"axes": {"a": {"x": {"policy": "kvpop_mpl"}}}},
            "no file configs/policy/kvpop_mpl.yaml; did you mean kvpop_mlp",
        ),
        ({"axes": {"a": {"x": {"eval.rows": 1}}}}, "it cannot be an axis"),
        (
            {"axes": {"a": {"x": {"policy.decay": 1}}, "b": {"y": {"policy.decay": 0.5}}}},
            "set by both a and b",
        ),
        ({"default": {"decay": "maybe"}}, "default: decay=maybe is no level"),
        ({"default": {"decya": True}}, "default: decya is no axis"),
        ({"design": "latin"}, "design=latin"),
        ({"seeds": [0, 0]}, "seeds=[0, 0]"),
        ({"objective": {"budgets": [32, 32]}}, "objective.budgets"),
        ({"objective": {"metrics": ["kll"]}}, "kll is no metric"),
        ({"objective": {"row": 3}}, "unknown key 'row'"),
        ({"overrides": ["policy.decay=1"]}, "an axis of the grid sets policy.decay"),
        ({"overrides": ["seed=3"]}, "write the seeds under `seeds`"),
        ({"constraints": [{"when": {"scorer": "mlp"}}]}, "constraints 1: expected"),
        ({"constraints": [{"when": {"scorer": "mlpp"}, "reason": "r"}]}, "scorer=mlpp is no level"),
        (
            {"constraints": [{"when": {"scorer": "mlp", "decay": True}, "reason": "r"}]},
            "default: decay=on scorer=mlp is left out",
        ),
        (
            {
                "design": "one_at_a_time",
                "constraints": [{"when": {"scorer": "linear", "decay": False}, "reason": "r"}],
            },
            "fits no cell",
        ),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], said: str) -> None:
    found = problems(**changes)
    assert any(said in line for line in found), found
    assert all("ablation_mine.yaml: " in line for line in found)


def test_every_impossible_cell_is_named_before_anything_starts() -> None:
    axes = {
        "topk": {"a": {"policy.budget.topk": 22}, "b": {"policy.budget.topk": 0}},
        "decay": {"x": {"policy.decay": 7}},
    }
    grid = load_grid(write(axes=axes))
    with pytest.raises(ConfigError) as caught:
        points_of(grid, [], Path("run"))
    text = "\n".join(caught.value.problems)
    assert "cell topk=b decay=x: policy.budget.topk=0" in text
    assert "cell topk=a decay=x: policy.decay=7.0" in text


def test_the_user_may_change_settings_but_no_axis() -> None:
    grid = load_grid(write())
    own = own_words(["ablate.name=mine", "workers=2", "run_dir=x", "trainer.max_steps=3", "only=decay=on"])
    assert own == ["trainer.max_steps=3"]
    points = points_of(grid, own, Path("run"))
    assert points[0].words[-1] == "trainer.max_steps=3"
    assert points[0].question["trainer.max_steps"] == 3
    with pytest.raises(ConfigError, match=r"policy\.decay=1: an axis"):
        points_of(grid, ["policy.decay=1"], Path("run"))
    with pytest.raises(ConfigError, match="seed"):
        points_of(grid, ["seed=4"], Path("run"))


def test_a_point_depends_on_its_settings_and_not_on_where_it_runs() -> None:
    grid = load_grid(write())
    first = points_of(grid, [], Path("run"))[0].question
    assert (
        points_of(grid, ["data.cache_dir=elsewhere", "trainer.accelerator=cpu"], Path("other"))[0].question
        == first
    )
    assert points_of(grid, ["trainer.scorer_lr=0.1"], Path("run"))[0].question != first
    assert (
        points_of(load_grid(write(objective={"budgets": [32], "rows": 3})), [], Path("run"))[0].question
        != first
    )


def test_shipped_grids_compose(project: Path) -> None:
    assert grid_names() == SHIPPED
    assert not any(name.startswith("ablation") for name in sweep_names())
    for name in SHIPPED:
        grid = replace(load_grid(name), seeds=(0,))  # composing takes a while
        points = points_of(grid, [], Path("run"))
        assert len(points) == len(grid.seeds) * sum(not cell.excluded for cell in grid.cells)
        assert compose(words_of_grid(name), command="ablate").run_dir == f"runs/ablations/{name}"
        assert len({point.folder for point in points}) == len(points)


def test_no_such_grid_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean smoke"):
        load_grid("smoek")
