"""From finished points to cells, each compared with the default cell on the same rows and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvpop_lightning.evaluation.statistics import mean, paired_interval
from kvpop_lightning.sweeps.grid import Grid
from kvpop_lightning.sweeps.grid_parts import Cell

Record = Mapping[str, Any]
"""One point as `point.json` holds it: state, message, values, rows, seconds, run_id."""
FINISHED, PARTIAL, FAILED, NOT_RUN, LEFT_OUT = "finished", "partly finished", "failed", "not run", "left out"


def build_table(grid: Grid, records: Mapping[tuple[str, int], Record]) -> dict[str, Any]:
    """The whole ablation as JSON values.

    Args:
        grid: the cells, the default first.
        records: of (cell label, seed), points that were run.
    """
    default = {seed: records.get((grid.cells[0].label, seed)) for seed in grid.seeds}
    return {
        "name": grid.name,
        "experiment": grid.experiment,
        "default": dict(grid.default),
        "design": grid.design,
        "seeds": list(grid.seeds),
        "rows": grid.objective.rows,
        "metrics": list(grid.objective.metrics),
        "budgets": grid.budgets,
        "cells": [_cell(grid, cell, records, default) for cell in grid.cells],
    }


def metric_key(name: str, budget: int | None, grid_budgets: Sequence[int | None]) -> str:
    """What a point calls a metric at a budget: plain at the first, `kl@64` at further ones."""
    return name if budget == grid_budgets[0] or name == "seconds" else f"{name}@{budget}"


def _cell(
    grid: Grid,
    cell: Cell,
    records: Mapping[tuple[str, int], Record],
    default: Mapping[int, Record | None],
) -> dict[str, Any]:
    own = {seed: records.get((cell.label, seed)) for seed in grid.seeds}
    points = [
        {"seed": seed, **{k: record.get(k) for k in ("state", "message", "seconds", "run_id")}}
        for seed, record in own.items()
        if record is not None
    ]
    finished = {s: r for s, r in own.items() if r is not None and r["state"] == FINISHED}
    results = []
    for budget in grid.budgets if finished else []:
        keys = {name: metric_key(name, budget, grid.budgets) for name in grid.objective.metrics}
        by_seed = {name: [r["values"].get(key) for r in finished.values()] for name, key in keys.items()}
        versus = {
            name: found
            for name, key in keys.items()
            if cell is not grid.cells[0] and (found := compare(finished, default, key)) is not None
        }
        results.append(
            {
                "budget": budget,
                "values": {name: mean(values) for name, values in by_seed.items()},
                "by_seed": by_seed,
                "versus_default": versus,
            }
        )
    return {
        "levels": dict(cell.levels),
        "label": cell.label,
        "words": list(cell.words),
        "state": _state(cell, points, len(grid.seeds)),
        "reason": cell.excluded or next((p["message"] for p in points if p["message"]), ""),
        "points": points,
        "results": results,
    }


def _state(cell: Cell, points: Sequence[Mapping[str, Any]], seeds: int) -> str:
    if cell.excluded:
        return LEFT_OUT
    done = sum(point["state"] == FINISHED for point in points)
    if done == seeds:
        return FINISHED
    if done:
        return PARTIAL
    return FAILED if points else NOT_RUN


def compare(
    first: Mapping[int, Record | None], second: Mapping[int, Record | None], key: str
) -> dict[str, Any] | None:
    """`first - second` over the seeds and rows that both have; None where there are none.

    `low` and `high` treat every (row, seed) pair as one observation. Seeds share their rows, so pairs are not
    independent: `row_low` and `row_high` first average over seeds and count rows only. A difference is
    `clear` when both intervals and every seed by itself are on the same side of zero.
    """
    both = []
    for seed, record in first.items():
        other = second.get(seed)
        mine = (record or {}).get("rows", {}).get(key)
        theirs = (other or {}).get("rows", {}).get(key)
        if mine and theirs and len(mine) == len(theirs):
            both.append((mine, theirs))
    if not both:
        return None
    ours = np.asarray([mine for mine, _ in both], dtype=np.float64)
    default = np.asarray([theirs for _, theirs in both], dtype=np.float64)
    if not (np.isfinite(ours).all() and np.isfinite(default).all()):
        return None
    pairs = paired_interval(ours.ravel().tolist(), default.ravel().tolist())
    rows = paired_interval(ours.mean(0).tolist(), default.mean(0).tolist())
    by_seed = (ours - default).mean(1).tolist()
    ends = [pairs.low, pairs.high, rows.low, rows.high, *by_seed]
    known = [end for end in ends if end is not None]
    one_side = all(end > 0 for end in known) or all(end < 0 for end in known)
    return {
        "difference": pairs.difference,
        "low": pairs.low,
        "high": pairs.high,
        "row_low": rows.low,
        "row_high": rows.high,
        "by_seed": by_seed,
        "pairs": int(ours.size),
        "rows": int(ours.shape[1]),
        "clear": one_side and len(known) == len(ends),
    }
