"""Copies the demo's table and figures into `docs/`, renews the table in README.md and docs/results.md.

    python benchmarks/publish_demo.py runs/demo

Figures typed in by hand go stale; these come from `table.json` alone.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = (
    "policy",
    "compression",
    "budget",
    "kl",
    "top1",
    "perplexity",
    "bytes_held",
    "bytes_accounted",
    "topk",
    "rows",
)
TABLE = "demo table"
"""What stands between `<!-- demo table -->` and `<!-- end of demo table -->`."""


def markdown(entries: list[dict], metric: str = "kl") -> str:
    """Policies down, budgets across; lowest learned value per budget in bold."""
    budgets = sorted({e["budget"] for e in entries if e["policy"] != "full"}, reverse=True)
    value = {(e["policy"], e["budget"]): e for e in entries}
    policies = list(dict.fromkeys(e["policy"] for e in entries if e["policy"] != "full"))
    best = {b: min(value[p, b][metric] for p in policies if p.startswith("kvpop")) for b in budgets}
    compression = {b: value[policies[0], b]["compression"] for b in budgets}
    lines = ["| policy | " + " | ".join(f"{b} keys ({compression[b]:.0%} less)" for b in budgets) + " |"]
    lines.append("|---" * (len(budgets) + 1) + "|")
    for policy in policies:
        cells = []
        for budget in budgets:
            number = value[policy, budget][metric]
            cells.append(
                f"**{number:.3f}**"
                if policy.startswith("kvpop") and number == best[budget]
                else f"{number:.3f}"
            )
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def replace_between(path: Path, text: str, name: str = TABLE) -> None:
    """Puts `text` between the comments that mark the part `name` of a page."""
    old, start, end = path.read_text(), f"<!-- {name} -->", f"<!-- end of {name} -->"
    if start not in old or end not in old:
        raise SystemExit(f"error: {path} has no '{start}' ... '{end}'")
    path.write_text(re.sub(f"{start}.*?{end}", lambda _: f"{start}\n{text}\n{end}", old, flags=re.DOTALL))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir
    entries = json.loads((run_dir / "table.json").read_text())
    figures = ROOT / "docs" / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for figure in sorted((run_dir / "figures").glob("*.png")):
        shutil.copy(figure, figures / f"demo_{figure.name}")
    kept = [{key: entry[key] for key in KEPT if key in entry} for entry in entries]
    (ROOT / "docs" / "demo_table.json").write_text(json.dumps(kept, indent=1) + "\n")
    table = markdown(entries)
    for page in (ROOT / "README.md", ROOT / "docs" / "results.md"):
        replace_between(page, table)


if __name__ == "__main__":
    main()
