"""What a decode step costs: time and memory against generated length and batch (`kvpop bench decode`)."""

from __future__ import annotations

from kvpop_lightning.generation.bench.run import decode_bench

__all__ = ["decode_bench"]
