"""What a prepared data set holds: lengths, packing, mix, how far solutions reach back, examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpop_lightning.config.schema import DataConfig
from kvpop_lightning.data import families
from kvpop_lightning.data.chat import ChatRenderer
from kvpop_lightning.data.distances import fact_distances
from kvpop_lightning.data.document_blocks import told
from kvpop_lightning.data.problem import Problem
from kvpop_lightning.data.rows import PackedRows, write_json

EDGES = (0, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000_000)
"""Bounds of the histograms, in tokens."""


def split_stats(rows: PackedRows) -> dict[str, Any]:
    """JSON-able: rows, tokens, packing, where the source's rows went, document lengths, mix of families."""
    lengths, documents, tokens, per_row = list[int](), Counter[str](), Counter[str](), list[int]()
    for pieces in rows.all_pieces():
        per_row.append(len(pieces))
        for piece in pieces:
            lengths.append(piece["tokens"])
            documents[piece["family"]] += 1
            tokens[piece["family"]] += piece["tokens"]
    index = rows.index
    return {
        "rows": len(rows),
        "rows_asked": index["rows_asked"],
        "row_length": rows.row_length,
        "tokens": index["tokens"],
        "supervised_share": index["supervised_tokens"] / max(1, index["tokens"]),
        "packing_efficiency": index["packing_efficiency"],
        "documents": len(lengths),
        "documents_per_row": float(np.mean(per_row)),
        "account": index.get("account"),
        "counts": index["counts"],
        "overlaps": index.get("overlaps", []),
        "lengths": histogram(lengths),
        "mix": {
            name: {"documents": count, "tokens": tokens[name]} for name, count in documents.most_common()
        },
    }


def histogram(values: Sequence[int]) -> dict[str, Any]:
    """Counts between `EDGES` with minimum, median, 90 % quantile and maximum."""
    array = np.asarray(values if len(values) else [0])
    low, median, high, most = (int(np.quantile(array, q)) for q in (0, 0.5, 0.9, 1))
    return {
        "counts": np.histogram(values, EDGES)[0].tolist(),
        "min": low, "median": median, "p90": high, "max": most,
    }  # fmt: skip


def reaches(config: DataConfig, names: Sequence[str], tokenizer: Any, documents: int = 3) -> dict[str, Any]:
    """Per family, the distance from each given fact to its uses in `documents` freshly written problems."""
    renderer = ChatRenderer(tokenizer, config.loss_on)

    def count(problem: Problem) -> int:
        return len(renderer(problem.messages))

    found = {}
    for name in names:
        distances = [
            reach.distance
            for index in range(documents)
            for reach in fact_distances(
                families.problem_of_length(name, f"stats/{index}", config.max_document_tokens, count),
                renderer,
            )
            if reach.given
        ]
        found[name] = histogram(distances)
    return found


def show(title: str, stats: dict[str, Any]) -> str:
    """A split's statistics as text."""
    lines = [
        f"{title}: {stats['rows']} rows of {stats['row_length']} tokens, {stats['documents']} documents "
        f"({stats['documents_per_row']:.1f} a row), {stats['tokens']} tokens, packed "
        f"{stats['packing_efficiency']:.1%}, supervised {stats['supervised_share']:.1%}"
    ]
    lines += [f"  source: {line}" for line in told({"split": title, **stats})]
    lines += ["  tokens of a document:", *bars(stats["lengths"]), "  mix (share of the tokens):"]
    for name, part in list(stats["mix"].items())[:20]:
        share = part["tokens"] / max(1, stats["tokens"])
        lines.append(f"    {name:<22}{share:6.1%}  {part['documents']} documents")
    return "\n".join(lines)


def bars(found: dict[str, Any]) -> list[str]:
    """A histogram as lines of text."""
    most = max(found["counts"]) or 1
    lines = [
        f"    {f'{low}+':>7} {'#' * round(36 * count / most):<36} {count}"
        for low, count in zip(EDGES[:-1], found["counts"], strict=True)
        if count
    ]
    quantiles = (found["min"], found["median"], found["p90"], found["max"])
    return [*lines, "    min {} median {} p90 {} max {}".format(*quantiles)]


def examples(rows: PackedRows, tokenizer: Any, number: int = 2, width: int = 300) -> list[str]:
    """The beginnings and ends of the first documents."""
    texts = []
    for index in range(min(number, len(rows))):
        row = rows[index]
        text = tokenizer.decode(row["input_ids"][row["document_ids"] == 0].tolist())
        texts.append(text if len(text) <= 2 * width else f"{text[:width]}\n[...]\n{text[-width:]}")
    return texts


def write(folder: Path, stats: dict[str, Any]) -> list[Path]:
    """`stats.json` and `stats.png` in `folder`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "stats.json", stats)
    splits = [name for name in ("train", "eval") if name in stats]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6))
    labels = [f"{low}+" for low in EDGES[:-1]]
    for offset, name in enumerate(splits):
        counts = np.array(stats[name]["lengths"]["counts"])
        axes[0].bar(np.arange(len(labels)) + 0.4 * offset, counts / max(1, counts.sum()), 0.4, label=name)
    axes[0].set_xticks(range(len(labels)), labels, rotation=60)
    axes[0].set_title("tokens of a document, share")
    axes[0].legend()
    mix = stats[splits[0]]["mix"]
    axes[1].barh(list(mix)[:16][::-1], [part["tokens"] for part in list(mix.values())[:16]][::-1])
    axes[1].set_title(f"tokens by family, {splits[0]}")
    if stats.get("distances"):
        for name, found in stats["distances"].items():
            counts = np.array(found["counts"])
            axes[2].plot(labels, counts / max(1, counts.sum()), label=name)
        axes[2].set_title("from a given fact to its uses, share")
        axes[2].tick_params(axis="x", labelrotation=60)
        axes[2].legend(fontsize=5, ncols=2)
    elif went := stats[splits[0]]["account"]:
        shown = {"kept": went["kept"], "not needed": went["not_needed"], **went["dropped"]}
        drawn = axes[2].barh(list(shown)[::-1], list(shown.values())[::-1])
        axes[2].bar_label(drawn, fontsize=7)
        axes[2].set_title(f"what became of {went['read']} rows, {splits[0]}")
        axes[2].tick_params(axis="y", labelsize=7)
    figure.tight_layout()
    figure.savefig(folder / "stats.png", dpi=110)
    plt.close(figure)
    return [folder / "stats.json", folder / "stats.png"]
