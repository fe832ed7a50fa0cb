"""A sweep file, a project folder and a fake child for the sweep tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kvpop_lightning.config.compose import compose
from kvpop_lightning.config.schema import Config
from kvpop_lightning.sweeps.spec import words_of_sweep

FAKE = (sys.executable, "-S", "-E", str(Path(__file__).with_name("fake_child.py")))
"""Without site packages it starts in a tenth of a second."""


def body(**changes: Any) -> dict[str, Any]:
    """A valid sweep file; None removes a key."""
    content: dict[str, Any] = {
        "experiment": "smoke",
        "overrides": ["policy=kvpop_mlp", "tracking.enabled=false", "data.eval_rows=4"],
        "objective": {"budget": 32, "rows": 2},
        "metrics": {"kl": "minimize"},
        "sampler": {"name": "random", "seed": 3},
        "trials": 5,
        "rescore": {"best": 2, "rows": 4},
        "baseline": [{"policy.budget.topk": 8, "policy.decay": 1.0}],
        "space": {
            "policy.budget.topk": {"type": "int", "low": 4, "high": 16},
            "policy.decay": {"type": "float", "low": 0.5, "high": 1.0},
        },
    }
    content |= changes
    return {key: value for key, value in content.items() if value is not None}


def write(folder: Path, name: str = "mine", **changes: Any) -> Path:
    """The sweep file in a project folder of its own (with `configs`, where results go)."""
    (folder / "configs").mkdir(exist_ok=True)
    path = folder / "sweeps" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(body(**changes), sort_keys=False))
    return path


def config_of(name: str, words: Sequence[str] = ()) -> Config:
    """As the command line composes it."""
    return compose([*words_of_sweep(name), f"sweep.name={name}", *words], command="sweep")
