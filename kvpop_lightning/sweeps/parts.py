"""Metrics, sampler and pruner of a sweep file, each checked on its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpop_lightning.config.choices import did_you_mean
from kvpop_lightning.sweeps.objective import METRICS
from kvpop_lightning.sweeps.space import Parameter

DIRECTIONS = ("minimize", "maximize")
SAMPLERS: dict[str, tuple[str, ...]] = {
    "tpe": ("startup_trials",),
    "gp": ("startup_trials",),
    "cmaes": ("startup_trials", "sigma"),
    "nsga2": ("population",),
    "qmc": ("sequence",),
    "grid": (),
    "random": (),
}
"""Samplers and their options beside `name` and `seed`."""
PRUNERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "median": ("metric", "every", "rows", "startup_trials", "warmup_steps"),
    "hyperband": ("metric", "every", "rows", "min_steps", "reduction_factor"),
    "wilcoxon": ("p_threshold", "startup_rows"),
}


@dataclass(frozen=True)
class SamplerSpec:
    name: str = "tpe"
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PrunerSpec:
    name: str = "none"
    metric: str = ""
    """What the trial reports by global step, or by row for `wilcoxon`."""
    every: int | None = None
    """Optimiser steps between two measurements of an `objective/...` metric; None = a quarter of the
    training."""
    rows: int = 1
    """Held-out rows of such a measurement."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def measured(self) -> str | None:
        """The objective's metric that is measured during the training; None = one that it logs anyway."""
        prefix, _, name = self.metric.partition("/")
        return name if prefix == "objective" and self.name not in ("none", "wilcoxon") else None


def metrics_of(body: Any, problems: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not isinstance(body, Mapping) or not body:
        problems.append("metrics: name at least one with its direction, as in `kl: minimize`")
        return (), ()
    for name, direction in body.items():
        if name not in METRICS:
            problems.append(f"metrics: unknown metric '{name}'{did_you_mean(str(name), METRICS)}")
        if direction not in DIRECTIONS:
            problems.append(f"metrics: {name}: {direction} is none of {', '.join(DIRECTIONS)}")
    return tuple(map(str, body)), tuple(map(str, body.values()))


def table_of(
    body: Mapping[str, Any], key: str, fields: tuple[str, ...], problems: list[str]
) -> dict[str, Any]:
    table = body.get(key) or {}
    if not isinstance(table, Mapping):
        problems.append(f"{key}: expected {{{', '.join(fields)}}}, got {table!r}")
        return {}
    for name in table:
        if name not in fields:
            problems.append(f"{key}: unknown field '{name}'{did_you_mean(str(name), fields)}")
    return dict(table)


def whole_of(
    table: Mapping[str, Any], key: str, default: int, problems: list[str], owner: str = "", low: int = 1
) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        name = f"{owner}.{key}" if owner else key
        problems.append(f"{name}={value}: must be a whole number, at least {low}")
        return default
    return value


def _named(
    body: Any,
    what: str,
    known: Mapping[str, tuple[str, ...]],
    default: str,
    extra: tuple[str, ...],
    problems: list[str],
) -> tuple[str, dict[str, Any]]:
    if isinstance(body, str):
        body = {"name": body}
    if not isinstance(body, Mapping):
        problems.append(f"{what}: expected {{name: {default}}}, got {body!r}")
        body = {}
    name = body.get("name", default)
    if name not in known:
        problems.append(f"{what}: unknown name '{name}'{did_you_mean(str(name), known)}")
        return default, {}
    allowed = ("name", *extra, *known[name])
    for key in body:
        if key not in allowed:
            problems.append(f"{what}: {name} has no option '{key}'{did_you_mean(str(key), allowed)}")
    return name, {str(k): v for k, v in body.items() if k != "name"}


def sampler_of(
    body: Any, space: tuple[Parameter, ...], directions: tuple[str, ...], problems: list[str]
) -> SamplerSpec:
    name, options = _named(body, "sampler", SAMPLERS, "tpe", ("seed",), problems)
    seed = options.pop("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        problems.append(f"sampler.seed={seed}: must be a whole number, at least 0")
        seed = 0
    if name == "cmaes":
        if len(directions) > 1:
            problems.append("sampler: cmaes takes one metric only: use nsga2, tpe or gp")
        if any(p.type == "categorical" or p.when for p in space):
            problems.append("sampler: cmaes takes numbers without conditions only: use tpe")
    for key in ("startup_trials", "population"):
        if key in options:
            whole_of(options, key, 1, problems, "sampler", low=2 if key == "population" else 1)
    sigma = options.get("sigma", 1.0)
    if isinstance(sigma, bool) or not isinstance(sigma, int | float) or sigma <= 0:
        problems.append(f"sampler.sigma={sigma}: must be above 0")
    if options.get("sequence", "sobol") not in ("sobol", "halton"):
        problems.append(f"sampler.sequence={options['sequence']}: must be sobol or halton")
    return SamplerSpec(name, seed, options)


def pruner_of(
    body: Any, metrics: tuple[str, ...], directions: tuple[str, ...], problems: list[str]
) -> PrunerSpec:
    name, options = _named(body, "pruner", PRUNERS, "none", (), problems)
    if name == "none":
        return PrunerSpec()
    if len(directions) > 1:
        problems.append(f"pruner: {name} compares one metric, this sweep has several: use none")
    first = metrics[0] if metrics else "kl"
    metric = f"objective_row/{first}" if name == "wilcoxon" else options.pop("metric", f"objective/{first}")
    every = whole_of(options, "every", 1, problems, "pruner") if options.get("every") is not None else None
    rows = whole_of(options, "rows", 1, problems, "pruner")
    for key in ("every", "rows"):
        options.pop(key, None)
    for key, low in (
        ("startup_trials", 0),
        ("warmup_steps", 0),
        ("startup_rows", 0),
        ("min_steps", 1),
        ("reduction_factor", 2),
    ):
        if key in options:
            whole_of(options, key, low, problems, "pruner", low=low)
    threshold = options.get("p_threshold", 0.1)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold < 1:
        problems.append(f"pruner.p_threshold={threshold}: must be in (0, 1)")
    spec = PrunerSpec(name, str(metric), every, rows, options)
    if spec.measured is not None and spec.measured not in ("kl", "top1", "nll"):
        problems.append(
            f"pruner.metric={metric}: only objective/kl, objective/top1 and objective/nll are measured "
            "during a training: choose one of them, or a metric that it logs, such as train/boundary_accuracy"
        )
    return spec
