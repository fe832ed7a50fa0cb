"""`kvpop demo`: the whole loop on a real model, from weights to a table."""

from __future__ import annotations

from kvpop_lightning.commands import Call
from kvpop_lightning.commands import compare as comparison
from kvpop_lightning.config.schema import Config

SUMMARY = "the whole loop on a real model: train, compare, table and figures in minutes"
DETAILS = """`kvpop compare` on SmolLM2-135M-Instruct with procedural mathematics. A second run reuses
    what is there, an interrupted one goes on."""
KEYS = comparison.KEYS
DEFAULT_EXPERIMENT: str | None = "demo"


def run(config: Config, call: Call) -> int:
    from kvpop_lightning.evaluation.compare import print_result
    from kvpop_lightning.tracking.resources import ResourceMeter

    with ResourceMeter() as meter:
        result = comparison.compare(config, call)
    print_result(result)
    print(f"wall time {meter.seconds:.0f} s, peak memory {meter.peak_bytes / 2**30:.2f} GiB (all processes)")
    print("every run, its curves and figures: make ui (or kvpop ui)")
    return 0
