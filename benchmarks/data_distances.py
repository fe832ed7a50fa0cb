"""How far back the worked solutions reach, per family: a table, docs/data_distances.json and .png.

    python benchmarks/data_distances.py --tokenizer PATH [--documents 40] [--out docs]

Solutions have log-uniform lengths from 300 to 4000 tokens. `distance` runs from the statement of a fact to
its uses, `lookup` from the last mention of its value, mentions within the same step (64 tokens) left out;
both in tokens of the rendered document. `given` are the data of the problem, `all` adds named results of
earlier steps.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from kvpop_lightning.data import ChatRenderer, fact_distances, tokenizer_fingerprint
from kvpop_lightning.data import families as problem_families
from kvpop_lightning.data.problem import Problem

SAME_STEP = 64
EDGES = (0, 30, 100, 300, 1000, 2000, 4000, 100000)


def measure(name: str, renderer: ChatRenderer, documents: int, low: int, high: int) -> dict[str, Any]:
    """Distances over `documents` documents of one family."""
    rng = random.Random(f"distances/{name}")

    def count(problem: Problem) -> int:
        return int(renderer(problem.messages).loss_mask.sum())

    reaches, lengths, solutions = [], [], []
    for index in range(documents):
        tokens = math.floor(math.exp(rng.uniform(math.log(low), math.log(high))))
        problem = problem_families.problem_of_length(name, f"distances/{index}", tokens, count)
        rendered = renderer(problem.messages)
        lengths.append(len(rendered))
        solutions.append(int(rendered.loss_mask.sum()))
        reaches += fact_distances(problem, renderer)
    result: dict[str, Any] = {
        "held_out": problem_families.get(name).held_out,
        "documents": documents,
        "tokens": {"min": min(lengths), "median": int(np.median(lengths)), "max": max(lengths)},
        "solution_tokens": {
            "min": min(solutions),
            "median": int(np.median(solutions)),
            "max": max(solutions),
        },
    }
    for kind in ("given", "all"):
        chosen = [reach for reach in reaches if kind == "all" or reach.given]
        for measured in ("distance", "lookup"):
            values = np.array([reach.distance for reach in chosen])
            if measured == "lookup":
                values = np.array([reach.gap for reach in chosen if reach.gap > SAME_STEP])
            result[f"{kind}_{measured}"] = {
                "uses": len(values),
                "median": int(np.median(values)),
                "p90": int(np.quantile(values, 0.9)),
                "share_from_1000": round(float((values >= 1000).mean()), 4),
                "histogram": np.histogram(values, EDGES)[0].tolist(),
            }
    return result


def table(results: dict[str, Any]) -> str:
    """Markdown table of the results."""
    head = (
        "family",
        "held out",
        "solution tokens: min, median, max",
        "given facts: median distance",
        "from 1000 on",
        "since last mention",
        "all facts: median distance",
        "from 1000 on",
    )
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, row in results.items():
        length, given, every = row["solution_tokens"], row["given_distance"], row["all_distance"]
        cells = (
            name,
            "yes" if row["held_out"] else "",
            f"{length['min']}, {length['median']}, {length['max']}",
            given["median"],
            f"{given['share_from_1000']:.0%}",
            row["given_lookup"]["median"],
            every["median"],
            f"{every['share_from_1000']:.0%}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path) -> None:
    """Small multiples: histogram of the distance of given facts, one panel per family."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 5
    rows = -(-len(results) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(10, 1.5 * rows), sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.flat[len(results) :]:
        axis.set_axis_off()
    labels = [f"{edge}+" for edge in EDGES[:-1]]
    for axis, (name, row) in zip(axes.flat, results.items(), strict=False):
        histogram = np.array(row["given_distance"]["histogram"])
        axis.bar(labels, histogram / histogram.sum(), color="#b5651d" if row["held_out"] else "#33658a")
        axis.set_title(name, fontsize=8)
        axis.tick_params(axis="x", labelrotation=90, labelsize=6)
        axis.tick_params(axis="y", labelsize=6)
    figure.suptitle("Share of uses by distance to the given fact, tokens (brown: held out)", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", help="folder or hub id; default: SmolLM2 of the demo")
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    folder = arguments.tokenizer
    if folder is None:
        from kvpop_lightning.models.smollm2 import smollm2_folder

        folder = str(smollm2_folder())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    renderer = ChatRenderer(tokenizer)
    names = problem_families.available(held_out=False) + problem_families.available(held_out=True)
    results = {name: measure(name, renderer, arguments.documents, 300, 4000) for name in names}
    print(table(results))
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = {"tokenizer": tokenizer_fingerprint(tokenizer), "edges": EDGES, "families": results}
    (arguments.out / "data_distances.json").write_text(json.dumps(content, indent=1) + "\n")
    draw(results, arguments.out / "data_distances.png")


if __name__ == "__main__":
    main()
