"""Latency and peak memory of a decode step over the generated length, one line per contestant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvpop_lightning.evaluation.figures import new_figure, save_figure, style_of, tidy
from kvpop_lightning.generation.bench.cells import lengths_text


def draw(report: dict[str, Any], folder: str | Path) -> list[Path]:
    """`decode_latency.png` and `decode_memory.png`, of the smallest batch; their paths."""
    cells = [cell for cell in report["cells"] if "median_ms" in cell]
    if not cells:
        return []
    batch = min(cell["rows"] for cell in cells)
    cells = [cell for cell in cells if cell["rows"] == batch]
    lengths = sorted({cell["length"] for cell in cells})
    paths = []
    for key, scale, label, file in (
        ("median_ms", 1, "ms per token (median)", "decode_latency.png"),
        ("peak_bytes", 2**30, f"peak memory {cells[0]['memory']}, GiB", "decode_memory.png"),
    ):
        figure = new_figure(7.2, 4.2)
        axes = figure.add_subplot()
        for name in dict.fromkeys(cell["contestant"] for cell in cells):
            points = sorted((c["length"], c[key] / scale) for c in cells if c["contestant"] == name)
            axes.plot(*zip(*points, strict=True), label=name, **style_of(name))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_minor_locator(NullLocator())
        names = dict(zip(lengths, lengths_text(lengths), strict=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _, names=names: names.get(round(x), "")))
        values = [cell[key] for cell in cells]
        if key == "median_ms" and max(values) > 10 * min(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens so far")
        axes.set_ylabel(label)
        keys = sum(report["budget"].values())
        axes.set_title(
            f"{report['shapes']} shapes, batch {batch}, {keys} keys a head, {report['device']}", fontsize=10,
            loc="left",
        )  # fmt: skip
        axes.legend(frameon=False, fontsize=9)
        tidy(axes)
        paths.append(save_figure(figure, Path(folder) / file))
    return paths
