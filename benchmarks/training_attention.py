"""Sparse training attention against dense attention and FlexAttention, Qwen3-4B's shapes, on one GPU.

    python benchmarks/training_attention.py [--json FILE] [--figure FILE]

32 query heads, 8 KV heads, head dimension 128, bfloat16, 4096 keys per KV head (4 sinks, window 256). Two
retention patterns: random priorities, and made-up ones that come in topics (neighbours are kept or dropped
together) and fade with age. Times are medians, everything included (the lists too); memory is the peak above
the inputs. Beside them, in the same run: FlexAttention under the same mask, the target pass under a given
normaliser,
eviction times of 8 heads, one length in float32. Ratios are to dense attention of the same length and dtype.
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
from kvpop_lightning.attention.flex import flex_sparse_attention
from kvpop_lightning.policy import Budget, dense_log_normalizer, eviction_time, future_attention_target

HEADS, KV_HEADS, D = 32, 8, 128
BUDGET = Budget(4, 256, 3836)
LENGTHS = (8192, 16384, 32768, 65536, 131072)
LONGEST_DENSE_BACKWARD = 65536
LONGEST_FLEX = 65536
FLOAT32_LENGTH = 16384


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    work()
    work()
    marks = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        marks.append((start, stop))
    # The host may run ahead, as in a training step.
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(stop) for start, stop in marks)[len(marks) // 2]


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


def measure_flex(T: int, inputs: list[Tensor], repeats: int) -> dict[str, float]:
    e = eviction_time(priorities("random", T), BUDGET)
    torch.compiler.reset()  # a form compiled for this length, not one for all lengths

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_sparse_attention(q, k, v, e, document_ids=None, scale=D**-0.5)[0]

    return measure(flex, inputs, repeats, True)


def measure_policy(T: int, q: Tensor, k: Tensor, repeats: int) -> list[dict]:
    """The target pass and the eviction times."""
    normalizer = dense_log_normalizer(q, k)
    priority = priorities("random", T)
    work = {
        "target pass": lambda: future_attention_target(q, k, window=BUDGET.window, normalizer=normalizer),
        "eviction times": lambda: eviction_time(priority, BUDGET),
    }
    return [
        {"T": T, "work": name, "forward_ms": milliseconds(do, repeats), "forward_mib": peak_mib(do)}
        for name, do in work.items()
    ]


def measure_float32() -> list[dict]:
    """One length in float32, against the memory-efficient dense kernel (the others take no float32)."""
    T = FLOAT32_LENGTH
    q, k, v = (torch.randn(1, h, T, D, device="cuda") for h in (HEADS, KV_HEADS, KV_HEADS))
    e = eviction_time(priorities("random", T), BUDGET)

    def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def ours(backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v: sparse_attention(q, k, v, e, budget=BUDGET, backend=backend, need_lse=False)[0]

    base = measure(full, [q, k, v], 3, True)
    rows = [{"T": T, "work": "dense SDPA, float32", **base}]
    for backend in ("triton", "sdpa"):
        row = {"T": T, "work": f"sparse, {backend}, float32", **measure(ours(backend), [q, k, v], 3, True)}
        rows.append(row)
    report(rows, T, base)
    return rows


def report(rows: list[dict], T: int, base: dict[str, float]) -> None:
    """Add the ratios to the rows of one length and print them."""
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
        if T <= LONGEST_FLEX:
            rows.append({"T": T, "work": "FlexAttention, random", **measure_flex(T, [q, k, v], repeats)})
        rows += measure_policy(T, q, k, repeats)
        report(rows, T, base)
        del q, k, v
        torch.cuda.empty_cache()
    rows += measure_float32()
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
