"""The report as one HTML page that needs no network: figures by Optuna and plotly, plotly's script once."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from kvpop_lightning.sweeps.report_data import StudyView, contour_pair

_STYLE = (
    "body{font-family:sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:left}p.note{color:#666}"
)


def page(view: StudyView, summary: Mapping[str, Any]) -> str:
    """The whole page.

    Raises:
        ImportError: plotly is not installed.
    """
    from plotly.offline import get_plotlyjs

    name = html.escape(str(summary["sweep"]))
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>',
        f"<script>{get_plotlyjs()}</script></head><body><h1>Sweep {name}</h1>",
        _counts(summary),
        _best(summary),
    ]
    for title, draw in _figures(view, summary):
        parts.append(f"<h2>{html.escape(title)}</h2>")
        parts.append(_drawn(draw))
    return "\n".join([*parts, "</body></html>"])


def _drawn(draw: Callable[[], Any]) -> str:
    """One figure; a degenerate study must not cost the others."""
    import plotly.io

    try:
        figure = draw()
        if not figure.data:
            return '<p class="note">Nothing to show: too few trials finished.</p>'
        return str(plotly.io.to_html(figure, full_html=False, include_plotlyjs=False))
    except Exception as error:
        return f'<p class="note">Not drawn: {html.escape(" ".join(str(error).split())[:300])}</p>'


def _figures(view: StudyView, summary: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    import optuna.visualization as draw

    if not view.trials:
        return
    study, keys = view.study, view.parameters()
    if view.several:
        names, first_two = [*view.metrics[:2]], lambda trial: trial.values[:2]
        front = partial(draw.plot_pareto_front, study, target_names=names, targets=first_two)
        yield "Pareto front", front
    for index, metric in enumerate(view.metrics):
        chosen: dict[str, Any] = {"target": view.target(index), "target_name": metric}
        weights = summary["importances"][metric]
        yield f"{metric}: optimisation history", partial(draw.plot_optimization_history, study, **chosen)
        yield f"{metric}: parameter importance", partial(_importance, weights)
        yield f"{metric}: slices", partial(draw.plot_slice, study, keys, **chosen)
        pair = contour_pair(view, weights)
        if pair is not None:
            contour = partial(draw.plot_contour, study, list(pair), **chosen)
            yield f"{metric}: {pair[0]} by {pair[1]}", contour
        yield f"{metric}: parallel coordinates", partial(draw.plot_parallel_coordinate, study, keys, **chosen)


def _importance(weights: Mapping[str, float]) -> Any:
    from plotly import graph_objects

    if not weights:
        raise ValueError("at least four finished trials with different results are needed")
    keys = sorted(weights, key=lambda key: weights[key])
    bar = graph_objects.Bar(x=[weights[key] for key in keys], y=keys, orientation="h")
    return graph_objects.Figure(bar, layout={"xaxis_title": "share of the variance explained (fANOVA)"})


def _counts(summary: Mapping[str, Any]) -> str:
    text = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in summary["states"].items())
    return f"<p>Trials: {html.escape(text) or 'none'}.</p>"


def _best(summary: Mapping[str, Any]) -> str:
    rows = []
    for entry in summary["best"][:20]:
        point = " ".join(f"{key}={value}" for key, value in entry["point"].items())
        values = "".join(f"<td>{value:.6g}</td>" for value in entry["values"].values())
        rows.append(f"<tr><td>{entry['number']}</td>{values}<td>{html.escape(point)}</td></tr>")
    if not rows:
        return '<p class="note">No trial finished with a finite result.</p>'
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in summary["metrics"])
    return f"<table><tr><th>best trial</th>{heads}<th>point</th></tr>{''.join(rows)}</table>"
