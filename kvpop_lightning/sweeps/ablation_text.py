"""An ablation's table on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from kvpop_lightning.sweeps.ablation_table import FINISHED, LEFT_OUT, NOT_RUN
from kvpop_lightning.sweeps.grid import HIGHER_IS_BETTER

NOTE = (
    "Differences are to the default (first line) on the same rows and seeds, with the 95 % paired t interval "
    "over (row, seed) pairs; * = also clear when only rows are counted, and in every seed by itself."
)


def terminal_tables(table: Mapping[str, Any]) -> list[Table | Text]:
    """The first metric: cells down, budgets across."""
    metric = table["metrics"][0]
    shown = Table(
        title=f"ablation {table['name']}: {metric}, {table['rows']} rows x {len(table['seeds'])} seeds",
        title_justify="left",
    )
    for axis in table["default"]:
        shown.add_column(axis, no_wrap=True)
    for budget in table["budgets"]:
        shown.add_column(f"{metric}, {_keys(budget)}", justify="right", no_wrap=True)
        shown.add_column("difference", justify="right")
    absent = sum(cell["state"] == NOT_RUN for cell in table["cells"])
    for index, cell in enumerate(table["cells"]):
        if cell["state"] == NOT_RUN:
            continue
        texts: list[Text] = []
        for place in range(len(table["budgets"])):
            value, difference = _cells_of(cell, place, metric)
            if not cell["results"]:
                difference = _why(cell) if place == 0 else ""
            texts += [Text(value), Text(difference, style=_style(cell, place, metric))]
        shown.add_row(
            *(Text(level) for level in cell["levels"].values()), *texts, style="bold" * (index == 0)
        )
    note = f"{NOTE} Not run: {absent} cells." if absent else NOTE
    return [shown, Text(note, style="dim")]


def markdown(table: Mapping[str, Any]) -> str:
    """Every metric at every budget."""
    parts = [f"## Ablation `{table['name']}`", NOTE]
    for metric in table["metrics"]:
        heads = [*table["default"]]
        for budget in table["budgets"]:
            heads += [f"{metric}, {_keys(budget)}", "difference"]
        lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for cell in table["cells"]:
            row = [*cell["levels"].values()]
            for place in range(len(table["budgets"])):
                value, difference = _cells_of(cell, place, metric)
                row += [value, difference if cell["results"] else _why(cell) if place == 0 else ""]
            lines.append(f"| {' | '.join(text.replace('|', '/') for text in row)} |")
        parts.append("\n".join(lines))
    ran = [p["seconds"] for c in table["cells"] for p in c["points"] if p["state"] == FINISHED]
    if ran:
        parts.append(f"{len(ran)} points, {sum(ran) / len(ran):.0f} s each on average.")
    return "\n\n".join(parts) + "\n"


def _keys(budget: int | None) -> str:
    return "own budget" if budget is None else f"{budget} keys"


def _why(cell: Mapping[str, Any]) -> str:
    if cell["state"] == NOT_RUN:
        return NOT_RUN
    return f"{cell['state']}: {cell['reason']}" if cell["reason"] else cell["state"]


def _cells_of(cell: Mapping[str, Any], place: int, metric: str) -> tuple[str, str]:
    if not cell["results"]:
        return "-", ""
    result = cell["results"][place]
    value = result["values"][metric]
    text = "-" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    if (found := result["versus_default"].get(metric)) is None:
        return text, ""
    interval = "" if found["low"] is None else f" [{found['low']:+.4f}, {found['high']:+.4f}]"
    return text, f"{found['difference']:+.4f}{interval}{' *' if found['clear'] else ''}"


def _style(cell: Mapping[str, Any], place: int, metric: str) -> str:
    if not cell["results"]:
        return "dim" if cell["state"] in (LEFT_OUT, NOT_RUN) else "red"
    found = cell["results"][place]["versus_default"].get(metric)
    if found is None or not found["clear"]:
        return ""
    return "green" if (found["difference"] > 0) == (metric in HIGHER_IS_BETTER) else "yellow"
