"""The points of an ablation: one training and measurement per cell and seed, kept in `point.json`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpop_lightning.config.describe import settings
from kvpop_lightning.errors import ConfigError
from kvpop_lightning.sweeps.files import read_json, write_json
from kvpop_lightning.sweeps.grid import Grid
from kvpop_lightning.sweeps.grid_parts import Cell, clashes, keys_of
from kvpop_lightning.sweeps.point import trial_config
from kvpop_lightning.sweeps.study import question
from kvpop_lightning.sweeps.trial import FINISHED, TrialResult

POINT_FILE = "point.json"


@dataclass(frozen=True)
class GridPoint:
    """One cell with one seed."""

    cell: Cell
    seed: int
    words: tuple[str, ...]
    """All its settings, the user's last."""
    folder: Path
    question: Mapping[str, Any]
    """The settings that its result depends on."""

    @property
    def key(self) -> tuple[str, int]:
        return self.cell.label, self.seed

    @property
    def name(self) -> str:
        """Of its tracking run."""
        return f"{self.cell.label} seed={self.seed}"

    def stored(self) -> dict[str, Any] | None:
        """Its record from an earlier run with the same settings."""
        record = read_json(self.folder / POINT_FILE)
        return record if record.get("question") == self.question else None

    def store(self, result: TrialResult) -> dict[str, Any]:
        record = {
            "cell": self.cell.label,
            "seed": self.seed,
            "state": result.state,
            "message": result.message,
            "values": result.values,
            "rows": result.rows,
            "seconds": round(result.seconds, 2),
            "run_id": result.run_id,
            "question": self.question,
        }
        write_json(self.folder / POINT_FILE, record)
        return record


def own_words(overrides: Sequence[str]) -> list[str]:
    """Words of the command line that concern a point, and not how the ablation is run."""
    left_out = ("run_dir", "tracking.run_name")
    return [
        word
        for word in overrides
        if not (key := word.partition("=")[0].strip()).startswith("ablate.")
        and f"ablate.{key}" not in settings()
        and key not in left_out
    ]


def points_of(grid: Grid, own: Sequence[str], folder: Path) -> list[GridPoint]:
    """Every point that no constraint leaves out, its settings composed and checked; seeds outside, so that a
    first table is there early.

    Raises:
        ConfigError: what cannot be, each problem with its cell.
    """
    varied = {key for levels in grid.axes.values() for words in levels.values() for key in keys_of(words)}
    problems = clashes(own, {*varied, "seed"}, "command line")
    points: list[GridPoint] = []
    for seed in grid.seeds if not problems else ():
        for cell in grid.cells:
            if cell.excluded:
                continue
            words = (*grid.words, *cell.words, f"seed={seed}", *own)
            try:
                config = trial_config(words, {}, grid.objective)
            except ConfigError as error:
                problems += [f"{grid.path}: cell {cell.label}: {line}" for line in error.problems]
                continue
            asked = json.loads(json.dumps({**question(config), "objective": grid.objective.to_dict()}))
            place = folder / "points" / f"{cell.slug}-seed{seed}"
            points.append(GridPoint(cell, seed, words, place, asked))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return points


def expected_seconds(point: GridPoint, known: Mapping[tuple[str, int], tuple[Cell, float]]) -> float | None:
    """What a point should take, by the finished ones that share most levels with it; None without any.

    Args:
        known: of finished points, their cell and seconds.
    """
    shared: dict[int, list[float]] = {}
    for cell, seconds in known.values():
        same = sum(point.cell.levels[axis] == level for axis, level in cell.levels.items())
        shared.setdefault(same, []).append(seconds)
    return statistics.median(shared[max(shared)]) if shared else None


def is_finished(record: Mapping[str, Any] | None) -> bool:
    return record is not None and record.get("state") == FINISHED
