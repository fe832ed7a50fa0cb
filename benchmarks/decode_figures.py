"""Figures of docs/decode.json: `python benchmarks/decode_figures.py` (latency and peak memory by length)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parents[1] / "docs"
LINES = {"full": "full cache (same kernels)", "kvpop_mlp b1": "KVpop, mlp", "kvpop_mlstm b1": "KVpop, mlstm"}
LINES |= {"streaming_llm b1": "StreamingLLM"}


def points(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = [report[key] for key in report if key == name or (name == "full" and key.startswith("full b1"))]
    return [point for part in found if isinstance(part, list) for point in part]


def main() -> None:
    report = json.loads((DOCS / "decode.json").read_text())
    for key, label, file in (
        ("median_ms", "ms per token (median)", "decode_latency.png"),
        ("peak_gib", "peak memory allocated, GiB", "decode_memory.png"),
    ):
        figure, axes = plt.subplots(figsize=(6, 3.6), constrained_layout=True)
        for name, text in LINES.items():
            found = points(report, name)
            axes.plot([p["seen"] for p in found], [p[key] for p in found], marker="o", label=text)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens so far")
        axes.set_ylabel(label)
        axes.set_title("Qwen3-4B shapes, batch 1, 4096 keys a head, one H200", fontsize=10)
        axes.legend()
        figure.savefig(DOCS / "figures" / file, dpi=130)


if __name__ == "__main__":
    main()
