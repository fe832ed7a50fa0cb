"""From row records to the comparison: `table.json`, a terminal table and a markdown version.

Values are means of per-row means, so that a difference of two table entries is the centre of its paired
interval; `perplexity` is the exponential of the mean row negative log-likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from kvpop_lightning.evaluation.statistics import mean, paired_interval
from kvpop_lightning.evaluation.store import plain, write_json

Entry = dict[str, Any]

METRICS: tuple[tuple[str, str, str], ...] = (
    ("kl", "KL to the dense model (nats per token, lower is better)", "{:.4f}"),
    ("top1", "Top-1 agreement with the dense model", "{:.1%}"),
    ("perplexity", "Perplexity", "{:.3f}"),
    ("retained_mass", "Share of the dense attention on keys still held", "{:.1%}"),
    ("boundary_balanced_accuracy", "Boundary accuracy (balanced over keep and drop)", "{:.1%}"),
    ("rank_correlation", "Spearman rank correlation of score and target", "{:.3f}"),
    ("bytes_held", "Bytes held per sequence (measured)", "{:,}"),
    ("bytes_accounted", "Bytes held per sequence at 2 bytes per element", "{:,}"),
)


def is_learned(policy: str) -> bool:
    return policy.startswith("kvpop_")


def _flat(value: Any) -> list[float | None]:
    if isinstance(value, (list, tuple)):
        return [x for part in value for x in _flat(part)]
    return [value]


def _over_rows(records: Sequence[Mapping[str, Any]], name: str) -> list[list[float | None]] | None:
    """[layer][head] means over the rows of a per-head metric; None when no row has it."""
    grids = [r[name] for r in records if r.get(name) is not None]
    if not grids:
        return None
    layers, heads = len(grids[0]), len(grids[0][0])
    return [[mean([g[layer][head] for g in grids]) for head in range(heads)] for layer in range(layers)]


def entry(
    policy: str, budget: int, reference_length: int, records: Sequence[Mapping[str, Any]], **facts: Any
) -> Entry:
    """One object of `table.json`.

    Args:
        policy: policy name.
        budget: total keys per KV head the policy was given (`reference_length` for `full`).
        reference_length: T_ref; `compression` is exactly `1 - budget / reference_length`.
        records: one per row: `row, kl, top1, nll, positions` and, where defined, `retained_mass` [L][Hq],
            `boundary_accuracy`, `boundary_balanced_accuracy`, `rank_correlation` [L][Hkv].
        facts: further fields (`topk`, `bytes_held` ...), copied.
    """
    per_head = ("retained_mass", "boundary_accuracy", "boundary_balanced_accuracy", "rank_correlation")
    rows = []
    for record in records:
        row = {k: record[k] for k in ("row", "kl", "top1", "nll", "positions")}
        row["perplexity"] = math.exp(record["nll"])
        row.update({name: mean(_flat(record.get(name))) for name in per_head})
        rows.append(row)
    nll = mean([r["nll"] for r in rows])
    assert nll is not None
    result: Entry = {
        "policy": policy,
        "compression": 1 - budget / reference_length,
        "budget": budget,
        "kl": mean([r["kl"] for r in rows]),
        "top1": mean([r["top1"] for r in rows]),
        "perplexity": math.exp(nll),
        "nll": nll,
        "reference_length": reference_length,
        "learned": is_learned(policy),
        **{name: mean([r[name] for r in rows]) for name in per_head},
        **facts,
        "rows": rows,
    }
    for name in per_head:
        result[f"{name}_by_head"] = _over_rows(records, name)
    return plain(result)


def refusal(policy: str, budget: int, reference_length: int, reason: str) -> Entry:
    """The object of a policy that cannot run at this budget: no figures, and `reason` says why."""
    nothing = dict.fromkeys(("kl", "top1", "perplexity", "nll"))
    return {
        "policy": policy,
        "compression": 1 - budget / reference_length,
        "budget": budget,
        **nothing,
        "reference_length": reference_length,
        "learned": is_learned(policy),
        "reason": reason,
        "rows": [],
        "versus": {},
    }


def ran(e: Entry | None) -> bool:
    """True for an entry with figures."""
    return e is not None and e["kl"] is not None


def add_intervals(table: Sequence[Entry], level: float = 0.95) -> None:
    """Give every entry `versus`: its paired difference to each learned policy at the same budget, by metric.

    A positive `kl` difference means that this entry is worse than the learned policy it is compared with.
    """
    for this in table:
        this["versus"] = {}
        for other in table:
            if other is this or not is_learned(other["policy"]) or other["budget"] != this["budget"]:
                continue
            by_row = {r["row"]: r for r in other["rows"]}
            common = [r for r in this["rows"] if r["row"] in by_row]
            if common:
                this["versus"][other["policy"]] = {
                    metric: paired_interval(
                        [r[metric] for r in common], [by_row[r["row"]][metric] for r in common], level=level
                    ).to_dict()
                    for metric in ("kl", "top1", "nll")
                }


def policies_of(table: Sequence[Entry]) -> list[str]:
    """Policy names in table order, each once."""
    return list(dict.fromkeys(e["policy"] for e in table))


def budgets_of(table: Sequence[Entry]) -> list[int]:
    """Budgets of the compressed policies, largest first (least compression first)."""
    return sorted({e["budget"] for e in table if e["policy"] != "full"}, reverse=True)


def find(table: Sequence[Entry], policy: str, budget: int) -> Entry | None:
    """The entry of a policy at a budget; `full` answers at every budget."""
    for e in table:
        if e["policy"] == policy and (e["budget"] == budget or policy == "full"):
            return e
    return None


def best_learned(table: Sequence[Entry], budget: int) -> Entry | None:
    learned = [e for e in table if e["budget"] == budget and is_learned(e["policy"]) and ran(e)]
    return min(learned, key=lambda e: e["kl"], default=None)


def summary_lines(table: Sequence[Entry]) -> list[str]:
    """One line per budget: the best KVpop form beside the best other policy that keeps to the budget and does
    not see the future.
    """
    lines = []
    for budget in budgets_of(table):
        best = best_learned(table, budget)
        rules = [
            e
            for e in table
            if e["budget"] == budget
            and ran(e)
            and e.get("bounded", True)
            and not is_learned(e["policy"])
            and e["policy"] not in ("full", "oracle")
        ]
        if best is None or not rules:
            continue
        rule = min(rules, key=lambda e: e["kl"])
        interval = rule["versus"][best["policy"]]["kl"]
        line = f"budget {budget}: {best['policy']} {best['kl']:.4f}, "
        line += f"best other {rule['policy']} {rule['kl']:.4f}, "
        line += f"that minus {best['policy']} {interval['difference']:+.4f}"
        if interval["low"] is not None:
            line += f" [{interval['low']:+.4f}, {interval['high']:+.4f}]"
        lines.append(line)
    return lines


TOLERATED = 1.02
"""Keys held over those of the column, beyond which a ragged policy is no fair neighbour."""


def notes(table: Sequence[Entry]) -> list[str]:
    """What the cells alone do not say: why a policy did not run, and whose memory has no bound."""
    lines = [
        f"{e['policy']} at {e['budget']} keys: cannot run ({e['reason']})" for e in table if e.get("reason")
    ]
    unbounded = [p for p in policies_of(table) if p != "full" and not is_bounded(table, p)]
    for policy in unbounded:
        line = f"{policy}: exempt from the budget, its memory grows with the text"
        for e in table:
            if e["policy"] == policy and "keys_held" in e:
                line += f"; trained for {e['budget']} keys, holds {e['keys_held']:.1f} on average"
                if e["keys_held"] > TOLERATED * e["budget"]:
                    line += ": more than the others of its column, compare it at its own size"
        lines.append(line)
    return lines


def is_bounded(table: Sequence[Entry], policy: str) -> bool:
    return all(e.get("bounded", True) for e in table if e["policy"] == policy)


def _shown(table: Sequence[Entry], policy: str) -> str:
    """A policy's name, with a star where its memory has no bound."""
    return policy if is_bounded(table, policy) else f"{policy}*"


def _header(table: Sequence[Entry], budget: int) -> str:
    some = next(e for e in table if e["budget"] == budget and e["policy"] != "full")
    return f"{budget} keys ({some['compression']:.0%})"


def terminal_table(table: Sequence[Entry], title: str = "KL to the dense model and top-1 agreement") -> Table:
    """Policies down, budgets across; each cell KL and top-1, the best learned policy of a budget in bold."""
    budgets = budgets_of(table)
    rows = max((len(e["rows"]) for e in table), default=0)
    result = Table(title=f"{title} ({rows} held-out rows)", title_justify="left")
    result.add_column("policy", no_wrap=True)
    for budget in budgets:
        result.add_column(_header(table, budget), justify="right", no_wrap=True)
    footer = [""]
    for budget in budgets:
        held = {
            e["bytes_accounted"]
            for e in table
            if e["budget"] == budget and "bytes_accounted" in e and e.get("bounded", True)
        }
        footer.append(
            " - ".join(f"{b / 2**20:.2f}" for b in sorted({min(held), max(held)})) + " MiB" if held else ""
        )
    for policy in policies_of(table):
        cells = [Text(_shown(table, policy), style="bold" if is_learned(policy) else "")]
        for budget in budgets:
            e = find(table, policy, budget)
            if e is None:
                cells.append(Text("-"))
                continue
            if not ran(e):
                cells.append(Text("cannot run", style="dim"))
                continue
            best = best_learned(table, budget)
            style = "bold green" if e is best else "dim" if policy in ("full", "oracle") else ""
            cells.append(Text(f"{e['kl']:.4f}  {e['top1']:6.1%}", style=style))
        result.add_row(*cells)
    if any(footer):
        result.add_section()
        result.add_row(
            Text("bytes at 2 per element", style="dim"), *(Text(f, style="dim") for f in footer[1:])
        )
    return result


def markdown(table: Sequence[Entry]) -> str:
    """Every metric as a markdown table (policies down, budgets across), the best learned policy in bold."""
    budgets = budgets_of(table)
    parts = []
    for name, title, form in METRICS:
        lines = [f"### {title}", "", "| policy | " + " | ".join(_header(table, b) for b in budgets) + " |"]
        lines.append("|---" * (len(budgets) + 1) + "|")
        for policy in policies_of(table):
            cells = []
            for budget in budgets:
                e = find(table, policy, budget)
                value = None if e is None else e.get(name)
                refused = e is not None and e.get("reason")
                cell = "cannot run" if refused else "-" if value is None else form.format(value)
                best = best_learned(table, budget)
                cells.append(f"**{cell}**" if e is not None and e is best else cell)
            lines.append(f"| {_shown(table, policy)} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    summary = summary_lines(table)
    if summary:
        parts.append(
            "### Best KVpop form and best other policy (KL, 95 % paired t interval over rows)\n\n"
            + "\n".join(f"- {line}" for line in summary)
        )
    if said := notes(table):
        parts.append("### Notes\n\n" + "\n".join(f"- {line}" for line in said))
    return "\n\n".join(parts) + "\n"


def write_table(table: Sequence[Entry], run_dir: str | Path) -> tuple[Path, Path]:
    """Write `table.json` and `table.md` into `run_dir`; returns both paths.

    Beside them `metrics.json`, policy -> budget -> `kl` and `top1`: DVC shows no figures of a list.
    """
    folder = Path(run_dir)
    write_json(folder / "table.json", list(table))
    metrics = dict[str, dict[str, Any]]()
    for e in filter(ran, table):
        metrics.setdefault(e["policy"], {})[str(e["budget"])] = {name: e[name] for name in ("kl", "top1")}
    write_json(folder / "metrics.json", metrics)
    (folder / "table.md").write_text(markdown(table))
    return folder / "table.json", folder / "table.md"
