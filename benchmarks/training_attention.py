"""Sparse training attention against dense attention and FlexAttention, Qwen3-4B's shapes, on one GPU.

    python benchmarks/training_attention.py [--json FILE] [--figure FILE]

32 query heads, 8 KV heads, head dimension 128, bfloat16, 4096 keys per KV head (4 sinks, window 256). Two
retention patterns: random priorities, and made-up ones that come in topics (neighbours are kept or dropped
together) and fade with age. Times are medians, everything included (the lists too); memory is the peak above
the inputs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvpop_lightning.attention import sparse_attention
from kvpop_lightning.policy import Budget, eviction_time

HEADS, KV_HEADS, D = 32, 8, 128
BUDGET = Budget(4, 256, 3836)
LENGTHS = (8192, 16384, 32768, 65536, 131072)
LONGEST_DENSE_BACKWARD = 65536


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    work()
    work()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[len(times) // 2]


def peak_mib(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def priorities(pattern: str, T: int) -> Tensor:
    g = torch.Generator("cuda").manual_seed(0)
    if pattern == "random":
        return torch.rand(1, KV_HEADS, T, generator=g, device="cuda", dtype=torch.float64)
    walk = torch.randn(1, KV_HEADS, T, generator=g, device="cuda", dtype=torch.float64).cumsum(-1) / 30
    noise = torch.randn(1, KV_HEADS, T, generator=g, device="cuda", dtype=torch.float64)
    half_life = torch.logspace(3, 5, KV_HEADS, device="cuda", dtype=torch.float64)[None, :, None]
    return (walk - walk.mean(-1, keepdim=True)).sin() + noise + torch.arange(T, device="cuda") / half_life


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def measure(
    attend: Callable[..., Tensor], inputs: list[Tensor], repeats: int, backward: bool
) -> dict[str, float]:
    """Forward, forward+backward in ms, peak MiB of each."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    grad = torch.randn_like(inputs[0])

    def forward() -> None:
        with torch.no_grad():
            attend(*inputs)

    def both() -> None:
        torch.autograd.grad(attend(*leaves), leaves, grad)

    row = {"forward_ms": milliseconds(forward, repeats), "forward_mib": peak_mib(forward)}
    if backward:
        row["both_ms"] = milliseconds(both, repeats)
        row["both_mib"] = peak_mib(both)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 2
    rows = []
    for T in LENGTHS:
        torch.manual_seed(0)
        # Memory order [B, T, H, D], as a model's projections leave it; dense attention has its own best.
        q, k, v = (
            torch.randn(1, T, h, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for h in (HEADS, KV_HEADS, KV_HEADS)
        )
        repeats = 3 if T > 40000 else 7
        contiguous = [x.contiguous() for x in (q, k, v)]
        base = measure(dense, contiguous, repeats, T <= LONGEST_DENSE_BACKWARD)
        rows.append({"T": T, "work": "dense SDPA", **base})
        del contiguous
        for pattern in ("random", "topics"):
            e = eviction_time(priorities(pattern, T), BUDGET)
            for deterministic in (False, True):
                if deterministic and pattern != "random":
                    continue

                def ours(q: Tensor, k: Tensor, v: Tensor, e: Tensor = e, d: bool = deterministic) -> Tensor:
                    out, _ = sparse_attention(
                        q, k, v, e, budget=BUDGET, backend="triton", need_lse=False, deterministic=d
                    )
                    return out

                name = f"sparse, {pattern}{', deterministic' if deterministic else ''}"
                rows.append({"T": T, "work": name, **measure(ours, [q, k, v], repeats, True)})
        for row in rows:
            if row["T"] == T:
                row["forward_ratio"] = base["forward_ms"] / row["forward_ms"]
                if "both_ms" in base and "both_ms" in row:
                    row["both_ratio"] = base["both_ms"] / row["both_ms"]
                print(
                    f"{T:7d} {row['work']:32s}",
                    *(f"{key} {value:.2f}" for key, value in row.items() if key not in ("T", "work")),
                    flush=True,
                )
    # Target pass and eviction times have their own script, benchmarks/policy_kernels.py.
    result = {"device": torch.cuda.get_device_name(), "budget": BUDGET.total, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.figure:
        draw(rows, options.figure)
    return 0


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for axis, key, title in zip(
        axes, ("forward_ms", "both_ms"), ("forward", "forward + backward"), strict=True
    ):
        for work in dict.fromkeys(row["work"] for row in rows):
            points = [(row["T"], row[key]) for row in rows if row["work"] == work and key in row]
            axis.plot(*zip(*points, strict=True), marker="o", label=work)
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title=title)
        axis.set_xticks(LENGTHS, [f"{T // 1024}k" for T in LENGTHS])
        axis.minorticks_off()
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
