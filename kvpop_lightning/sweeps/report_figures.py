"""The report's main figures as PNG, for documents: history, importance, contour, front."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvpop_lightning.sweeps.report_data import StudyView, best_so_far, contour_pair

BLUE, RED, GREY = "#0072B2", "#D55E00", "#999999"


def draw_all(view: StudyView, summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """Every figure that the study has enough for."""
    if not view.trials:
        return []
    weights = summary["importances"][view.metrics[0]]
    paths = [_history(view, folder / "history.png")]
    if weights:
        paths.append(_importance(weights, view.metrics[0], folder / "importance.png"))
    pair = contour_pair(view, weights)
    if pair is not None:
        paths.append(_contour(view, pair, folder / "contour.png"))
    if view.several:
        paths.append(_front(view, folder / "pareto.png"))
    return paths


def _history(view: StudyView, path: Path) -> Path:
    figure, axes = _figure(7.0, 4.0)
    axes.plot(view.numbers, [t.values[0] for t in view.trials], "o", color=BLUE, label="finished trial")
    axes.step(view.numbers, best_so_far(view), where="post", color=RED, label="best so far")
    axes.set_xlabel("trial")
    axes.set_ylabel(view.metrics[0])
    axes.legend(frameon=False)
    return _save(figure, path)


def _importance(weights: Mapping[str, float], metric: str, path: Path) -> Path:
    figure, axes = _figure(7.0, 1.2 + 0.4 * len(weights))
    keys = sorted(weights, key=lambda key: weights[key])
    axes.barh(keys, [weights[key] for key in keys], color=BLUE)
    axes.set_xlabel(f"share of the variance of {metric} explained (fANOVA)")
    return _save(figure, path)


def _contour(view: StudyView, pair: tuple[str, str], path: Path) -> Path:
    """Values between the trials by triangles; the trials themselves as dots."""
    trials = [trial for trial in view.trials if all(key in trial.params for key in pair)]
    x, y = (np.asarray([float(trial.params[key]) for trial in trials]) for key in pair)
    z = np.asarray([trial.values[0] for trial in trials])
    figure, axes = _figure(6.4, 4.6)
    if len(trials) > 3 and len(np.unique(np.stack([x, y], 1), axis=0)) > 3 and np.ptp(z) > 0:
        try:
            shown = axes.tricontourf(x, y, z, levels=12, cmap="cividis_r")
            figure.colorbar(shown, ax=axes, label=view.metrics[0])
        except (RuntimeError, ValueError):  # all on one line: no triangles
            pass
    axes.scatter(x, y, c="white", edgecolors="black", s=28, linewidths=0.8)
    pick = int(np.argmin(z) if view.directions[0] == "minimize" else np.argmax(z))
    axes.plot(x[pick], y[pick], "*", color=RED, markersize=14, label=f"best {z[pick]:.4g}")
    axes.set_xlabel(pair[0])
    axes.set_ylabel(pair[1])
    axes.legend(frameon=False, loc="upper right")
    return _save(figure, path)


def _front(view: StudyView, path: Path) -> Path:
    figure, axes = _figure(6.4, 4.4)
    axes.plot(
        [t.values[1] for t in view.trials], [t.values[0] for t in view.trials], "o", color=GREY, label="trial"
    )
    front = sorted((t.values[1], t.values[0]) for t in view.study.best_trials)
    axes.plot(*zip(*front, strict=True), "o-", color=RED, label="front")
    axes.set_xlabel(view.metrics[1])
    axes.set_ylabel(view.metrics[0])
    axes.legend(frameon=False)
    return _save(figure, path)


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
