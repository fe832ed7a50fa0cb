"""`kvpop bench decode`: all contestants, batches and lengths; JSON, a table, two figures."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvpop_lightning.config.choices import GATED
from kvpop_lightning.config.policies import retrofit_options, with_policy
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError
from kvpop_lightning.generation.bench import models
from kvpop_lightning.generation.bench.cells import (
    PATHS,
    Cell,
    Sizes,
    cells,
    lengths_text,
    prepare,
    prompt_cell,
)
from kvpop_lightning.models.sources import load_model, resolve_device
from kvpop_lightning.policy import Budget
from kvpop_lightning.training.progress import ProgressLine

ON_GPU: dict[str, Any] = {
    "shapes": "qwen3-4b", "budget": 4096, "lengths": (4096, 16384, 32768, 65536, 131072), "batches": (1, 8),
    "steps": 60,
}  # fmt: skip
ON_CPU: dict[str, Any] = {
    "shapes": "tiny", "budget": 64, "lengths": (64, 256, 1024), "batches": (1, 4), "steps": 20,
}  # fmt: skip
KEEPS_ALL = ("full", "library", "static")


def decode_bench(config: Config, report: dict[str, Any] | None = None) -> dict[str, Any]:
    """Measures what `bench.*` asks for; the report as written to `decode.json`.

    Args:
        report: a dictionary to fill while it goes on, so that an interruption leaves what was measured.

    Raises:
        UserError: sizes that do not fit together.
    """
    wanted, device = config.bench, resolve_device(config.model.device)
    by_device = ON_GPU if device.type == "cuda" else ON_CPU
    shapes = by_device["shapes"] if wanted.shapes == "auto" else wanted.shapes
    budget = budget_of(wanted.budget or by_device["budget"])
    lengths = tuple(wanted.lengths) or by_device["lengths"]
    batches = tuple(wanted.batches) or by_device["batches"]
    if lengths[0] < 1 or list(lengths) != sorted(set(lengths)):
        raise UserError(f"bench.lengths={list(lengths)} must rise, from 1 on")
    if min(batches) < 1:
        raise UserError(f"bench.batches={list(batches)} must be at least 1 each")
    if not wanted.contestants:
        raise UserError("bench.contestants=[]: name at least one, as in bench.contestants=[full,kvpop_mlp]")
    sizes = Sizes(lengths, wanted.steps or by_device["steps"], wanted.warmup, wanted.chunk, wanted.reduction)
    model = _model(config, shapes, device)
    report = {} if report is None else report
    report |= {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "torch": torch.__version__, "shapes": shapes, "steps": sizes.steps, "warmup": sizes.warmup,
        "inputs": wanted.inputs,
        "budget": {"sink": budget.sink, "window": budget.window, "topk": budget.topk},
        "weight_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "cells": [],
    }  # fmt: skip
    if device.type == "cuda":
        report["copy_bytes_per_s"] = copy_bandwidth(device)
    total = len(wanted.contestants) * len(batches) * len(lengths) + (wanted.prompt > 0)
    line = ProgressLine("bench decode", total, unit="cell", interval=2.0, enabled=config.trainer.progress)
    done = 0
    for contestant in wanted.contestants:
        for rows in batches:
            for cell in cells(model, contestant, budget, rows, sizes, **options_of(config, contestant)):
                report["cells"].append(_with_floor(cell, report))
                done += 1
                line.update(done, partial(_said, cell))
    if wanted.prompt:
        name = next((name for name in wanted.contestants if name not in KEEPS_ALL), "streaming_llm")
        prepare(model, name, budget, **options_of(config, name))
        report["prompt"] = {"contestant": name} | prompt_cell(model, wanted.prompt, wanted.chunk, _ignore)
        line.update(done + 1)
    line.close()
    return report


def _ignore(seen: int) -> None:
    return None


def budget_of(total: int) -> Budget:
    """4 sinks, a sixteenth as window (256 of 4096), the rest by priority."""
    window = max(1, total // 16)
    return Budget(4, window, total - 4 - window)


def options_of(config: Config, contestant: str) -> dict[str, Any]:
    """What `retrofit` takes for it, beside policy and budget."""
    if contestant in KEEPS_ALL:
        return {}
    chosen = with_policy(config, contestant)
    # Not `policy.scorer.inputs`, whose `auto` differs between mlp and mLSTM: both are measured alike.
    scorer = replace(chosen.policy.scorer, inputs=config.bench.inputs)
    options = retrofit_options(replace(chosen, policy=replace(chosen.policy, scorer=scorer)))
    del options["policy"]
    if contestant in GATED:
        options["inputs"] = "hidden"
    return options


def _model(config: Config, shapes: str, device: torch.device) -> Any:
    if shapes == "configured":
        return load_model(config.model)[0]
    return models.qwen3_4b(device) if shapes == "qwen3-4b" else models.tiny(device)


def copy_bandwidth(device: torch.device, size: int = 2**32) -> float:
    """Bytes a second of a copy on the device, read and written ones counted."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize(device)
    return 10 * 2 * size / (start.elapsed_time(end) / 1000)


def _with_floor(cell: Cell, report: dict[str, Any]) -> Cell:
    """Adds the time that reading the weights and the cache once takes at the speed of a copy."""
    if "copy_bytes_per_s" in report and "cache_bytes" in cell:
        moved = report["weight_bytes"] + cell["cache_bytes"]
        cell["floor_ms"] = round(1000 * moved / report["copy_bytes_per_s"], 3)
    return cell


def _said(cell: Cell) -> str:
    what = f"{cell['median_ms']:.2f} ms" if "median_ms" in cell else cell["reason"]
    return f"{cell['contestant']}, batch {cell['rows']}, {lengths_text([cell['length']])[0]}: {what}"


def markdown(report: dict[str, Any]) -> str:
    """Latency (median and 95th percentile), throughput and peak memory by length, a table for each."""
    found: Sequence[Cell] = report["cells"]
    lengths = sorted({cell["length"] for cell in found})
    rows = list(dict.fromkeys((cell["contestant"], cell["rows"]) for cell in found))
    by_place = {(cell["contestant"], cell["rows"], cell["length"]): cell for cell in found}
    views: tuple[tuple[str, Callable[[Cell], str]], ...] = (
        ("ms a step, median (95th percentile)", lambda c: f"{c['median_ms']:.3f} ({c['p95_ms']:.3f})"),
        ("tokens a second", lambda c: f"{c['tokens_per_s']:,.0f}"),
        ("peak memory, GiB", lambda c: f"{c['peak_bytes'] / 2**30:.3f}"),
    )
    kinds = sorted({cell["memory"] for cell in found if "memory" in cell})
    budget = report["budget"]
    parts = [
        f"{report['device']}, {report['shapes']} shapes, {sum(budget.values())} keys a head, "
        f"{report['steps']} steps a cell; memory {' and '.join(kinds)}."
    ]
    for title, view in views:
        lines = [f"| {title} | " + " | ".join(lengths_text(lengths)) + " |"]
        lines.append("|---" * (len(lengths) + 1) + "|")
        for contestant, batch in rows:
            shown = []
            for length in lengths:
                cell = by_place.get((contestant, batch, length))
                shown.append("-" if cell is None else "does not fit" if "reason" in cell else view(cell))
            lines.append(f"| {contestant}, batch {batch} | " + " | ".join(shown) + " |")
        parts.append("\n".join(lines))
    used = dict.fromkeys((cell["contestant"], PATHS[cell["path"]]) for cell in found)
    parts.append("\n".join(f"- {contestant}: {path}" for contestant, path in used))
    if "prompt" in report:
        p = report["prompt"]
        parts.append(
            f"A prompt of {p['tokens']} tokens in chunks of {p['chunk']} ({p['contestant']}): "
            f"{p['seconds']} s, peak {p['peak_bytes'] / 2**30:.3f} GiB, {p['first_peak_bytes'] / 2**30:.3f} "
            "once the cache was full and a chunk more was read."
        )
    return "\n\n".join(parts) + "\n"


def write(report: dict[str, Any], folder: str | Path) -> list[Path]:
    """`decode.json`, `decode.md`, and the figures; their paths."""
    from kvpop_lightning.generation.bench.figures import draw

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "decode.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "decode.md").write_text(markdown(report))
    return [folder / "decode.json", folder / "decode.md", *draw(report, folder)]
