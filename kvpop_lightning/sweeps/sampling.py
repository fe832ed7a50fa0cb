"""Samplers and pruners of a sweep, as Optuna knows them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from kvpop_lightning.errors import UserError
from kvpop_lightning.sweeps.parts import PrunerSpec, SamplerSpec
from kvpop_lightning.sweeps.space import Parameter, Point, grid_points
from kvpop_lightning.sweeps.spec import Sweep

LAID_OUT = ("grid", "qmc")
"""Samplers whose points depend on nothing but their number."""


def laid_out_points(sweep: Sweep, count: int) -> list[Point] | None:
    """The first `count` points of a grid or a low-discrepancy sequence; None for samplers that see results.

    They are fixed before any worker starts, so that two workers can never draw the same one.
    """
    if sweep.sampler.name == "grid":
        return grid_points(sweep.space)[:count]
    if sweep.sampler.name == "qmc":
        return _sequence(sweep.space, sweep.sampler, count)
    return None


def _sequence(space: Sequence[Parameter], spec: SamplerSpec, count: int) -> list[Point]:
    from scipy.stats import qmc

    engine_of = qmc.Halton if spec.options.get("sequence") == "halton" else qmc.Sobol
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Sobol wants a power of two: a sweep may be continued
        engine: Any = engine_of(len(space), scramble=True, seed=spec.seed)
        shares = engine.random(count)
    points = []
    for row in shares:
        point: Point = {}
        for parameter, share in zip(space, row, strict=True):
            if parameter.active(point):
                point[parameter.key] = parameter.at(float(share))
        points.append(point)
    return points


def build_sampler(sweep: Sweep, ticket: int) -> Any:
    """The sampler for one trial. Its seed depends on the trial's number: a sweep that is continued, or
    another worker, does not draw the first points again."""
    import optuna

    spec = sweep.sampler
    seed = (spec.seed * 1_000_003 + ticket) % 2**32
    startup = spec.options.get("startup_trials")
    given = {"n_startup_trials": startup} if startup is not None else {}
    samplers = optuna.samplers
    try:
        if spec.name == "tpe":
            return samplers.TPESampler(seed=seed, **given)
        if spec.name == "gp":
            return samplers.GPSampler(seed=seed, warn_independent_sampling=False, **given)
        if spec.name == "cmaes":
            sigma = {"sigma0": spec.options["sigma"]} if "sigma" in spec.options else {}
            return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False, **given, **sigma)
        if spec.name == "nsga2":
            return samplers.NSGAIISampler(seed=seed, population_size=spec.options.get("population", 16))
        return samplers.RandomSampler(seed=seed)
    except ImportError as error:
        raise UserError(f"sampler: {spec.name} needs a package that is not there: {error}") from error


def build_pruner(spec: PrunerSpec, max_steps: int, every: int) -> Any:
    """The pruner; steps are optimiser steps, rows of the evaluation for `wilcoxon`."""
    import optuna

    pruners, options = optuna.pruners, spec.options
    if spec.name == "median":
        return pruners.MedianPruner(
            n_startup_trials=options.get("startup_trials", 5), n_warmup_steps=options.get("warmup_steps", 0)
        )
    if spec.name == "hyperband":
        return pruners.HyperbandPruner(
            min_resource=options.get("min_steps", min(every, max_steps)),
            max_resource=max_steps,
            reduction_factor=options.get("reduction_factor", 3),
        )
    if spec.name == "wilcoxon":
        return pruners.WilcoxonPruner(
            p_threshold=options.get("p_threshold", 0.1), n_startup_steps=options.get("startup_rows", 2)
        )
    return pruners.NopPruner()
