"""Floating-point operations that a training step needs, and what a device could do: their ratio is the
model FLOPs utilisation (MFU).

Counted is what the mathematics asks for, one multiplication and one addition = 2, and nothing that is done
over again or beside it (targets, sorting, softmax, optimiser):

* a weight matrix: 2 per weight and token forward, 4 backward;
* attention: 4 D per query head and visible key forward (`q k` and `p v`), 8 D backward;
* frozen base, cached features: only the scorers, 6 per scorer weight and token;
* frozen base, live: one dense forward of the decoder without its output head, and the scorers;
* trained base: dense teacher forward, sparse student forward and backward, both with the output head.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "GH200": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 150.0,
    "A30": 165.0,
    "A10": 125.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""Dense bfloat16 tensor-core peak in 10^12 FLOP/s from the data sheets, by part of the device's name; float32
work is measured against the same number. The longest matching name counts."""


@dataclass(frozen=True)
class DecoderShape:
    """What a forward costs."""

    weights: int
    """Of the decoder layers' matrices."""
    head_weights: int
    """Of the output head."""
    layers: int
    query_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: Any) -> DecoderShape:
        """From a causal language model of the transformers library."""
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        decoder = getattr(model, "model", model)
        weights = sum(p.numel() for layer in decoder.layers for p in layer.parameters() if p.dim() > 1)
        return cls(
            weights=weights,
            head_weights=config.vocab_size * config.hidden_size,
            layers=config.num_hidden_layers,
            query_heads=config.num_attention_heads,
            head_dim=head_dim,
        )

    def forward(self, tokens: float, visible_keys: float, *, head: bool) -> float:
        """FLOPs of one forward.

        Args:
            tokens: in all rows.
            visible_keys: summed over the tokens, for one head.
            head: with the output head.
        """
        weights = self.weights + (self.head_weights if head else 0)
        return 2.0 * weights * tokens + 4.0 * self.layers * self.query_heads * self.head_dim * visible_keys


@dataclass(frozen=True)
class StepCost:
    """FLOPs of a training from what it has seen."""

    base: DecoderShape | None
    """None = the base does not run (cached features)."""
    scorer_weights: int
    trains_base: bool = False

    def flops(self, tokens: float, dense_keys: float, sparse_keys: float) -> float:
        """Of `tokens` that saw `dense_keys` keys in the dense and `sparse_keys` in the bounded forward."""
        total = 6.0 * self.scorer_weights * tokens
        if self.base is None:
            return total
        total += self.base.forward(tokens, dense_keys, head=self.trains_base)
        if self.trains_base:
            total += 3.0 * self.base.forward(tokens, sparse_keys, head=True)
        return total


def peak_flops(device: Any, configured_tflops: float | None = None) -> float | None:
    """FLOP/s that one device could do at best: configured, from its data sheet, or of a CPU measured.

    Args:
        device: a torch device.
        configured_tflops: `tracking.peak_tflops`.

    Returns:
        None for a GPU that is not in the table: no utilisation is better than a wrong one.
    """
    import torch

    if configured_tflops is not None:
        return configured_tflops * 1e12
    if device.type == "cuda":
        return listed_peak(torch.cuda.get_device_name(device))
    return measured_peak() if device.type == "cpu" else None


def listed_peak(name: str) -> float | None:
    """The data sheet's FLOP/s of a device by its name."""
    known = [
        part for part in PEAK_TFLOPS if all(word in name.replace("-", " ").split() for word in part.split())
    ]
    return PEAK_TFLOPS[max(known, key=len)] * 1e12 if known else None


@cache
def measured_peak(size: int = 768, seconds: float = 0.1) -> float:
    """FLOP/s of this process's CPU threads in float32 matrix products, the best of those done in
    `seconds`."""
    import torch

    generator = torch.Generator().manual_seed(0)  # the run's own random numbers stay as they are
    left, right = (torch.randn(size, size, generator=generator) for _ in range(2))
    out = left @ right
    best, until = 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < until:
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        best = max(best, 2.0 * size**3 / (time.perf_counter() - started))
    return best
