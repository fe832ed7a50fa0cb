"""`kvpop bench decode`: what a token costs, in time and memory, against length and batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpop_lightning.commands import Call
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError

SUMMARY = "measure latency, throughput and memory of decoding against length and batch"
DETAILS = """decode: for every contestant, batch and length the median and 95th percentile of a step,
    throughput and peak memory, warm-up and compiling excluded, the device awaited. Written to
    RUN_DIR/bench: decode.json, decode.md and two figures. Weights are random unless shapes=configured; the
    caches are as after so many tokens. On a GPU memory is what was allocated, on a CPU weights and cache are
    added up. contestants=library,static adds the library's own growing and compiled static caches;
    prompt=131072 also reads a prompt in chunks and notes the peak."""
KEYS = (
    "bench.shapes",
    "bench.contestants",
    "bench.inputs",
    "bench.budget",
    "bench.lengths",
    "bench.batches",
    "bench.steps",
    "bench.warmup",
    "bench.reduction",
    "bench.prompt",
    "bench.chunk",
    "model.device",
    "run_dir",
)
DEFAULT_EXPERIMENT: str | None = None


def take_words(words: Sequence[str]) -> tuple[list[str], str]:
    """Settings and what to measure.

    Raises:
        UserError: anything but `decode`.
    """
    rest = [word for word in words if "=" not in word] or ["decode"]
    if rest != ["decode"]:
        raise UserError(f"kvpop bench {' '.join(rest)}: write kvpop bench decode")
    return [word for word in words if "=" in word], "decode"


def run(config: Config, call: Call) -> int:
    from kvpop_lightning.generation.bench import decode_bench
    from kvpop_lightning.generation.bench.run import markdown, write

    report: dict[str, Any] = {}
    try:
        decode_bench(config, report)
    finally:  # interrupted, what was measured until then
        if report.get("cells"):
            print(markdown(report))
            for path in write(report, Path(config.run_dir) / "bench"):
                print(path)
    return 0
