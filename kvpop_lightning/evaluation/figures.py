"""The pictures of a comparison, drawn without a display and saved as png.

Colours are those of Okabe and Ito, told apart with any colour vision; marker and line style repeat the
distinction.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvpop_lightning.evaluation.statistics import mean
from kvpop_lightning.evaluation.table import (
    Entry,
    best_learned,
    budgets_of,
    find,
    is_learned,
    policies_of,
    ran,
)

STYLES: dict[str, dict[str, Any]] = {
    "streaming_llm": {"color": "#666666", "marker": "s", "linestyle": "--"},
    "random": {"color": "#56B4E9", "marker": "v", "linestyle": ":"},
    "random+decay": {"color": "#56B4E9", "marker": "^", "linestyle": "-"},
    "key_norm": {"color": "#E69F00", "marker": "<", "linestyle": ":"},
    "key_norm+decay": {"color": "#E69F00", "marker": ">", "linestyle": "-"},
    "kvpop_linear": {"color": "#CC79A7", "marker": "D", "linestyle": "-"},
    "kvpop_mlp": {"color": "#D55E00", "marker": "o", "linestyle": "-"},
    "kvpop_mlstm": {"color": "#0072B2", "marker": "P", "linestyle": "-"},
    "oracle": {"color": "#000000", "marker": "*", "linestyle": "-."},
    "full": {"color": "#000000", "marker": "o", "linestyle": "--"},
    "library": {"color": "#009E73", "marker": "x", "linestyle": ":"},
    "static": {"color": "#009E73", "marker": "d", "linestyle": "-."},
    "dms": {"color": "#CC79A7", "marker": "h", "linestyle": "-."},
    "dmc": {"color": "#009E73", "marker": "H", "linestyle": "-."},
}
_SPARE = ("#009E73", "#CC79A7", "#B8A400", "#999999")
_SPARE_MARKERS = ("x", "1", "p", "X", "2", "H", "+", "3", "8")
_DPI = 130


def style_of(policy: str) -> dict[str, Any]:
    known = STYLES.get(policy)
    if known is None:
        turn = sum(policy.encode())  # the same in every figure
        marker = _SPARE_MARKERS[turn % len(_SPARE_MARKERS)]
        known = {"color": _SPARE[turn % len(_SPARE)], "marker": marker, "linestyle": "--"}
    return {
        **known,
        "linewidth": 2.4 if is_learned(policy) else 1.4,
        "markersize": 10 if known["marker"] == "*" else 7,
        "zorder": 3 if is_learned(policy) else 2,
    }


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    return path


def tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _log_ticks(axes: Axes, low: float, high: float) -> None:
    """Plain numbers at 1, 2, 5 times the powers of ten: one decade often holds all the values."""
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = [m * 10.0**d for d in decades for m in (1, 2, 5)]
    axes.yaxis.set_major_locator(FixedLocator([t for t in ticks if low / 1.3 <= t <= high * 1.3]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


NOTHING = 1e-6
"""KL of what evicts nothing (a gate that never closed): rounding, which would stretch the axis."""


def kl_against_budget(table: Sequence[Entry], path: str | Path, title: str | None = None) -> Path:
    """KL to the dense model against keys held per KV head, one line per policy, both axes logarithmic."""
    budgets = budgets_of(table)
    figure = new_figure(7.6, 4.6)
    axes = figure.add_subplot()
    lines: list[tuple[float, str, Any]] = []
    values: list[float] = []
    for policy in policies_of(table):
        found = [find(table, policy, b) for b in budgets]
        points = [
            (e.get("keys_held", e["budget"]), e["kl"])
            for e in found
            if e is not None and e["kl"] is not None and e["kl"] > NOTHING
        ]
        if policy == "full" or not points:
            continue
        (line,) = axes.plot(*zip(*points, strict=True), label=policy, **style_of(policy))
        lines.append((points[-1][1], policy, line))
        values += [kl for _, kl in points]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    compression = {e["budget"]: e["compression"] for e in table}
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda b, _: f"{b:g}\n{compression.get(round(b), float('nan')):.0%}")
    )
    if values:
        _log_ticks(axes, min(values), max(values))
    axes.set_xlabel("keys held per KV head, and compression")
    axes.set_ylabel("KL to the dense model (nats per token)")
    rows = max((len(e["rows"]) for e in table), default=0)
    axes.set_title(
        title or f"Divergence from the dense model, mean of {rows} held-out rows", fontsize=11, loc="left"
    )
    tidy(axes)
    lines.sort(key=lambda item: -item[0])  # the order in which the lines end at the smallest budget
    figure.legend(
        [line for _, _, line in lines],
        [name for _, name, _ in lines],
        loc="outside right upper",
        frameon=False,
    )
    return save_figure(figure, path)


def paired_differences(table: Sequence[Entry], path: str | Path) -> Path | None:
    """KL of every policy minus that of the best learned one at the same budget, with 95 % paired intervals.

    One panel per budget, the lowest KL on top; right of zero = worse than the best learned policy. An entry
    of one row has no interval, one that could not run is named without a point.

    Returns:
        `path`; None where no learned policy was evaluated.
    """
    panels = [(b, best) for b in budgets_of(table) if (best := best_learned(table, b)) is not None]
    if not panels:
        return None
    names = [p for p in policies_of(table) if p != "full"]
    figure = new_figure(3.2 + 2.9 * len(panels), 1.2 + 0.24 * len(names))
    for n, (budget, best) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), n + 1)
        found = {name: find(table, name, budget) for name in names}
        order = sorted(names, key=lambda name: e["kl"] if ran(e := found[name]) and e else np.inf)
        for place, name in enumerate(order):
            e, style = found[name], style_of(name)
            if e is None or not ran(e):
                axes.text(
                    0.0, place, "  cannot run" if e else "  -", va="center", fontsize=7, color="#777777"
                )
                continue
            versus = e["versus"].get(best["policy"], {}).get("kl") if e is not best else {"difference": 0.0}
            if versus is None:
                continue
            center, low = versus["difference"], versus.get("low")
            if low is not None:
                axes.plot([low, versus["high"]], [place, place], color=style["color"], linewidth=1.6)
            axes.plot([center], [place], marker=style["marker"], color=style["color"], markersize=6)
        axes.axvline(0.0, color="#444444", linewidth=0.8)
        axes.set_yticks(range(len(order)), order, fontsize=7)
        axes.set_ylim(len(order) - 0.4, -0.6)
        axes.set_title(f"{budget} keys, minus {best['policy']} ({best['kl']:.3f})", fontsize=9, loc="left")
        axes.set_xlabel("difference in KL (nats per token)", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        tidy(axes)
    return save_figure(figure, path)


def retained_mass_by_layer(table: Sequence[Entry], path: str | Path) -> Path:
    """Dense attention on keys still held, by layer (mean over heads and rows), one panel per budget."""
    budgets = budgets_of(table)
    figure = new_figure(3.6 * max(len(budgets), 1) + 1.8, 4.2)
    panels = np.atleast_1d(figure.subplots(1, max(len(budgets), 1), sharey=True))
    handles: dict[str, Any] = {}
    for axes, budget in zip(panels, budgets, strict=False):
        for policy in policies_of(table):
            e = find(table, policy, budget)
            if policy == "full" or e is None or e.get("retained_mass_by_head") is None:
                continue
            by_layer = [mean(heads) for heads in e["retained_mass_by_head"]]
            style = {**style_of(policy), "markersize": 4, "markevery": max(1, len(by_layer) // 10)}
            (handles[policy],) = axes.plot(range(len(by_layer)), by_layer, label=policy, **style)
        axes.set_title(f"{budget} keys", fontsize=11, loc="left")
        axes.set_xlabel("layer")
        tidy(axes)
    panels[0].set_ylabel("share of dense attention retained")
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    figure.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False)
    return save_figure(figure, path)


def _visible(token: str) -> str:
    """A token's text as one short printable word."""
    shown = token.replace("\n", "\\n").replace("\t", "\\t").replace("$", r"\$")
    shown = "".join(c if c.isprintable() else "·" for c in shown)
    return ("␣" if not shown else shown if not shown.isspace() else "␣" * len(shown))[:12]


def busiest_stretch(share: np.ndarray, width: int, window: int, sink: int) -> int:
    """Start of the `width` tokens, outside sinks and window, on which layers and heads disagree most."""
    length = share.shape[1]
    spread = (share * (1 - share)).mean(0) + share.var(0)
    usable = np.convolve(spread, np.ones(width), mode="valid")
    last = max(length - window - width, 0)
    first = min(sink, last)
    return first + int(np.argmax(usable[first : last + 1]))


def eviction_pattern(
    patterns: dict[str, np.ndarray],
    tokens: Sequence[str],
    path: str | Path,
    *,
    heads: int,
    query: int | None = None,
    sink: int = 0,
    window: int = 1,
    detail: str | None = None,
    detail_tokens: int = 56,
    title: str | None = None,
) -> Path:
    """What each policy still holds of one text: layers down, tokens across, colour = share of heads.

    Args:
        patterns: policy name -> [L, T] share of KV heads (0..1) that hold the token at `query`.
        tokens: T token texts; a stretch of them is written out under an enlarged part.
        heads: KV heads per layer (levels of the colour scale).
        query: row position at which the cache is looked at; None = the end of the text.
        sink, window: left out when the enlarged stretch is chosen.
        detail: policy whose stretch is enlarged; None = the last in `patterns`.
        detail_tokens: width of the enlarged stretch.
        title: above the whole picture.

    Raises:
        ValueError: no pattern given.
    """
    if not patterns:
        raise ValueError("eviction_pattern needs at least one policy's pattern")
    detail = detail or list(patterns)[-1]
    length = patterns[detail].shape[1]
    query = length - 1 if query is None else query
    figure = new_figure(13.5, 2.3 * len(patterns) + 3.6)
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    panels = figure.subplots(len(patterns) + 1, 1, height_ratios=[1.0] * len(patterns) + [1.35])
    base = matplotlib.colormaps["cividis_r"]
    levels = min(heads, 8)
    shades = [(1.0, 1.0, 1.0, 1.0), *(base(0.15 + 0.85 * n / levels) for n in range(1, levels + 1))]
    colours = ListedColormap(np.asarray(shades))
    norm = BoundaryNorm(np.linspace(-0.5 / levels, 1 + 0.5 / levels, levels + 2), colours.N)
    width = min(detail_tokens, length)
    start = busiest_stretch(patterns[detail][:, : query + 1], min(width, query + 1), window, sink)
    image = None
    for axes, (policy, share) in zip(panels, patterns.items(), strict=False):
        image = axes.imshow(share, aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
        axes.set_title(f"{policy}: keys held at token {query}", fontsize=10, loc="left")
        axes.set_ylabel("layer")
        axes.set_xlim(-0.5, query + 0.5)
        if policy == detail:
            top, bottom = -0.5, share.shape[0] - 0.5
            axes.plot(
                [start - 0.5, start + width - 0.5, start + width - 0.5, start - 0.5, start - 0.5],
                [top, top, bottom, bottom, top],
                color="#D55E00",
                linewidth=2,
                clip_on=False,
            )
    panels[-2].set_xlabel("token")
    axes = panels[-1]
    stretch = slice(start, start + width)
    axes.imshow(
        patterns[detail][:, stretch],
        aspect="auto",
        interpolation="nearest",
        cmap=colours,
        norm=norm,
        extent=(start - 0.5, start + width - 0.5, patterns[detail].shape[0] - 0.5, -0.5),
    )
    axes.set_title(
        f"{detail}: tokens {start} to {start + width - 1} (framed above)",
        fontsize=10,
        loc="left",
        color="#D55E00",
    )
    axes.set_ylabel("layer")
    axes.xaxis.set_major_locator(FixedLocator(range(start, start + width)))
    axes.set_xticklabels([_visible(t) for t in tokens[stretch]], rotation=90, fontsize=9, family="monospace")
    assert image is not None
    bar = figure.colorbar(
        image, ax=list(panels), fraction=0.02, pad=0.01, ticks=np.linspace(0, 1, levels + 1)
    )
    bar.ax.set_yticklabels([f"{round(x * heads)} of {heads}" for x in np.linspace(0, 1, levels + 1)])
    bar.set_label("KV heads that hold the token")
    return save_figure(figure, path)
