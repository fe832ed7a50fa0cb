"""Figures of docs/compare.json (all policies) and docs/dms.json, and the comparison's table in
docs/results.md.

    python benchmarks/compare_figures.py [RESULT_FOLDER]

With the folder of a finished `kvpop compare policies=all` (its `table.json`) docs/compare.json is renewed
first; `setting.json` beside it says how it was run. Prints every metric as markdown, and each policy's
difference to the best learned one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from publish_demo import replace_between

from kvpop_lightning.evaluation.figures import kl_against_budget, paired_differences
from kvpop_lightning.evaluation.table import (
    best_learned,
    budgets_of,
    find,
    is_bounded,
    markdown,
    policies_of,
    ran,
)

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


def renew(folder: Path) -> None:
    """docs/compare.json from a result folder; figures by head are left out but for the keys held."""
    setting = json.loads((folder / "setting.json").read_text())
    table = [
        {
            name: value
            for name, value in entry.items()
            if not name.endswith("_by_head") or name == "keys_held_by_head"
        }
        for entry in json.loads((folder / "table.json").read_text())
    ]
    report = {**setting, "table": rounded(table)}
    (DOCS / "compare.json").write_text(json.dumps(report, separators=(",", ":")) + "\n")


def rounded(value: Any) -> Any:
    """Numbers to six digits after the point, everywhere inside."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list):
        return [rounded(x) for x in value]
    if isinstance(value, dict):
        return {name: rounded(x) for name, x in value.items()}
    return value


def short_table(table: list[dict[str, Any]]) -> str:
    """KL of every policy and budget; the lowest of the policies that keep to the budget, the oracle apart, in
    bold.
    """
    budgets = budgets_of(table)
    best = {
        b: min(
            e["kl"]
            for e in table
            if e["budget"] == b and ran(e) and e.get("bounded", True) and e["policy"] != "oracle"
        )
        for b in budgets
    }
    lines = [
        "| policy | " + " | ".join(f"{b} keys" for b in budgets) + " |",
        "|---" * (len(budgets) + 1) + "|",
    ]
    for policy in policies_of(table):
        if policy == "full":
            continue
        cells = []
        for budget in budgets:
            e = find(table, policy, budget)
            if e is None:
                cells.append("")
            elif not ran(e):
                cells.append("cannot run")
            else:
                bold = "**" if e["kl"] == best[budget] and is_bounded(table, policy) else ""
                cells.append(f"{bold}{e['kl']:.3f}{bold}")
        star = "" if is_bounded(table, policy) else "*"
        lines.append(f"| {policy}{star} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def differences(table: list[dict[str, Any]]) -> str:
    """One line per policy and budget: KL minus that of the best learned policy, with its paired interval."""
    lines = []
    for budget in budgets_of(table):
        best = best_learned(table, budget)
        for e in table:
            if best is None or e["budget"] != budget or best["policy"] not in e["versus"]:
                continue
            d = e["versus"][best["policy"]]["kl"]
            lines.append(
                f"{budget}: {e['policy']} - {best['policy']} {d['difference']:+.3f} "
                f"[{d['low']:+.3f}, {d['high']:+.3f}]"
            )
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) > 1:
        renew(Path(sys.argv[1]))
    table = json.loads((DOCS / "compare.json").read_text())["table"]
    kl_against_budget(table, DOCS / "figures" / "compare_kl_vs_budget.png")
    paired_differences(table, DOCS / "figures" / "compare_differences.png")
    draw_dms(json.loads((DOCS / "dms.json").read_text()), DOCS / "figures" / "dms.png")
    replace_between(DOCS / "results.md", short_table(table), "comparison")
    print(markdown(table))
    print(differences(table))


if __name__ == "__main__":
    main()
