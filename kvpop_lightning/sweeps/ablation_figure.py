"""An ablation as one picture: each difference to the default with its interval, a panel per budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#666666")
"""Okabe and Ito: told apart with any colour vision."""


def draw(table: Mapping[str, Any], path: Path, metric: str | None = None) -> Path | None:
    """A forest plot; None when no cell can be compared with the default."""
    metric = metric or table["metrics"][0]
    cells = [cell for cell in table["cells"] if cell["results"]]
    if not any(r["versus_default"].get(metric) for cell in cells for r in cell["results"]):
        return None
    axis = _coloured_axis(table)
    levels = list(dict.fromkeys(cell["levels"][axis] for cell in cells))
    colours = {level: COLOURS[index % len(COLOURS)] for index, level in enumerate(levels)}
    budgets = table["budgets"]
    figure = Figure(
        figsize=(3.2 + 3.0 * len(budgets), 1.6 + 0.34 * len(cells)), layout="constrained", facecolor="white"
    )
    FigureCanvasAgg(figure)
    panels = np.atleast_1d(figure.subplots(1, len(budgets), sharey=True))
    for place, (axes, budget) in enumerate(zip(panels, budgets, strict=True)):
        base = cells[0]["results"][place]["values"].get(metric)
        for y, cell in enumerate(cells):
            found = cell["results"][place]["versus_default"].get(metric)
            colour = colours[cell["levels"][axis]]
            if found is None:
                if cell is cells[0]:
                    axes.plot(0, y, marker="D", color="black", markersize=6)
                continue
            if found["low"] is not None:
                axes.plot([found["low"], found["high"]], [y, y], color=colour, linewidth=2)
            if found["row_low"] is not None:
                axes.plot([found["row_low"], found["row_high"]], [y, y], color=colour, linewidth=0.8)
            axes.plot(found["by_seed"], [y] * len(found["by_seed"]), "|", color=colour, markersize=9)
            face = colour if found["clear"] else "white"
            axes.plot(found["difference"], y, "o", color=colour, markerfacecolor=face, markersize=6)
        axes.axvline(0, color="#999999", linewidth=0.8, zorder=0)
        keys = "own budget" if budget is None else f"{budget} keys"
        axes.set_title(keys + (f" (default {base:.3f})" if base is not None else ""), fontsize=10, loc="left")
        axes.set_xlabel(f"{metric}: difference to the default", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, axis="x", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    panels[0].set_yticks(range(len(cells)))
    panels[0].set_yticklabels([_short(cell, table) for cell in cells], fontsize=9)
    panels[0].invert_yaxis()
    figure.suptitle(
        f"{table['name']}: {table['rows']} rows x {len(table['seeds'])} seeds. Thick: 95 % interval over "
        "pairs; thin: over rows;\nticks: seeds; filled: clear",
        fontsize=9,
        x=0.01,
        ha="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def _coloured_axis(table: Mapping[str, Any]) -> str:
    """The last axis with more than one level."""
    varied = [axis for axis in table["default"] if len({cell["levels"][axis] for cell in table["cells"]}) > 1]
    return varied[-1] if varied else next(iter(table["default"]))


def _short(cell: Mapping[str, Any], table: Mapping[str, Any]) -> str:
    """What is not the default where one thing changes at a time, else every level."""
    if table["design"] == "crossed":
        return " ".join(cell["levels"].values())
    other = [f"{axis} {level}" for axis, level in cell["levels"].items() if level != table["default"][axis]]
    return ", ".join(other) or "default"
