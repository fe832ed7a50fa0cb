"""Figures of docs/compare.json (all policies) and docs/dms.json: `python benchmarks/compare_figures.py`.

Prints the table of docs/compare.json as markdown.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from kvpop_lightning.evaluation.figures import kl_against_budget, paired_differences
from kvpop_lightning.evaluation.table import markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
TARGETS = {"dms": "128 keys, weight 10", "dms256": "256 keys, weight 10", "dms_w1": "128 keys, weight 1"}
OTHERS = ("streaming_llm", "streaming_llm_plus", "kvpop_mlp", "kvpop_mlstm", "oracle")


def draw_dms(report: dict[str, Any], path: Path) -> None:
    """The closed share while training, the keys that each head holds, KL at the bytes really held."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 3.7), constrained_layout=True)
    colours = dict(zip(TARGETS, ("#D55E00", "#0072B2", "#009E73"), strict=True))
    entries = {e["label"]: e for e in report["table"] if e["label"] in TARGETS}
    for name, text in TARGETS.items():
        curve = report["curves"][name]
        step = [p["step"] for p in curve]
        left.plot(step, [p["closed"] for p in curve], color=colours[name], label=text)
        left.plot(step, [p["target"] for p in curve], color=colours[name], linestyle=":", linewidth=1)
        heads = sorted(x for layer in entries[name]["keys_held_by_head"] for x in layer)
        middle.plot(range(1, len(heads) + 1), heads, color=colours[name], label=text)
        right.plot(
            [entries[name]["bytes_accounted"] / 2**20], [entries[name]["kl"]], "*", ms=12, c=colours[name]
        )
        right.annotate(
            f"dms, {text}", (entries[name]["bytes_accounted"] / 2**20, entries[name]["kl"]), fontsize=7,
            xytext=(0, -11), textcoords="offset points", ha="center",
        )  # fmt: skip
    for name in OTHERS:
        points = sorted(
            (e["bytes_accounted"] / 2**20, e["kl"]) for e in report["table"] if e["label"] == name
        )
        right.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1, label=name)
    left.set(xlabel="step", ylabel="share of keys closed (dotted: target)")
    middle.set(xlabel="heads of all layers, in order", ylabel="keys held of 1024", yscale="log")
    right.set(xlabel="MiB per sequence (2 bytes per element)", ylabel="KL to the dense model", yscale="log")
    for axes in (left, middle, right):
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=130)


def main() -> None:
    table = json.loads((DOCS / "compare.json").read_text())["table"]
    kl_against_budget(table, DOCS / "figures" / "compare_kl_vs_budget.png")
    paired_differences(table, DOCS / "figures" / "compare_differences.png")
    draw_dms(json.loads((DOCS / "dms.json").read_text()), DOCS / "figures" / "dms.png")
    print(markdown(table))


if __name__ == "__main__":
    main()
