"""Sparse training attention against dense attention and FlexAttention, Qwen3-4B's shapes, on one GPU.

    python benchmarks/training_attention.py [--json FILE] [--figure FILE] [--patterns FILE] [--parts ...]

32 query heads, 8 KV heads, head dimension 128, bfloat16. Retention patterns: random priorities under 4096
keys per KV head (4 sinks, window 256); made-up ones that come in topics (neighbours are kept or dropped
together) and fade with age; and, from the file of `attention_patterns.py`, those of SmolLM2's trained scorers
on text, eight (layer, head) pairs, rows packed from documents of 8192 tokens, under 1024 and 2048 keys.
Times are medians, everything included (the lists too); memory is the peak above the inputs. Beside them, in
the same run: FlexAttention under the same mask, the target pass under a given normaliser, eviction times of 8
heads, one length in float32, and every backend where `auto` has to choose. Ratios are to dense attention of
the same length and dtype; for packed rows also to dense attention inside each document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvpop_lightning.attention import sparse_attention
from kvpop_lightning.attention.dispatch import choose_backend
from kvpop_lightning.attention.flex import flex_sparse_attention
from kvpop_lightning.policy import (
    Budget,
    dense_log_normalizer,
    eviction_time,
    future_attention_target,
    static_priority,
)

HEADS, KV_HEADS, D = 32, 8, 128
BUDGET = Budget(4, 256, 3836)
LENGTHS = (8192, 16384, 32768, 65536, 131072)
LONGEST_DENSE_BACKWARD = 65536
LONGEST_FLEX = 65536
LONGEST_FLEX_TARGET = 32768
FLOAT32_LENGTH = 16384
TEXT_BUDGETS = (1024, 2048)
CHOICES = ((512, 128), (1024, 256), (2048, 512), (4096, 1024), (8192, 2048), (8192, 4096), (8192, 7168))
"""(tokens, keys) at which every backend is timed; FlexAttention, compiled anew for each, at some of them."""
FLEX_CHOICES = (2048, 8192)
PARTS = ("lengths", "text", "float32", "backends")


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
    ids = torch.arange(T, device="cuda").div(8192, rounding_mode="floor")[None]
    packed = Budget(4, 256, 764)
    # A copy: the layout of documents seen before would be found again.
    work = {
        "target pass": lambda: future_attention_target(q, k, window=BUDGET.window, normalizer=normalizer),
        "target pass, FlexAttention": lambda: future_attention_target(
            q, k, window=BUDGET.window, normalizer=normalizer, backend="flex"
        ),
        "eviction times": lambda: eviction_time(priority, BUDGET),
        "eviction times, documents": lambda: eviction_time(priority, packed, document_ids=ids.clone()),
    }
    if T > LONGEST_FLEX_TARGET:
        del work["target pass, FlexAttention"]
    return [
        {"T": T, "work": name, "forward_ms": milliseconds(do, repeats), "forward_mib": peak_mib(do)}
        for name, do in work.items()
    ]


class Text:
    """Patterns of trained scorers on text."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="pt", device="cuda") as file:
            self.scores = file.get_tensor("scores")
            self.about = json.loads(file.metadata()["about"])

    def pattern(self, T: int, keys: int) -> tuple[Tensor, Tensor]:
        """Eviction times [1, 8, T] under `keys` keys, and document ids [1, T]."""
        documents = self.scores.shape[2]
        score = self.scores[:, : T // documents].reshape(1, KV_HEADS, T)
        ids = torch.arange(T, device="cuda").div(documents, rounding_mode="floor")[None]
        # More slots hold a token longer: the decay's rate falls with them.
        decay = torch.tensor(self.about["decay"], dtype=torch.float64) ** (self.about["budget"] / keys)
        priority = static_priority(score, decay=decay, decay_step=self.about["decay_step"], document_ids=ids)
        return eviction_time(priority, Budget(4, 256, keys - 260), document_ids=ids), ids


def measure_text(text: Text, T: int, inputs: list[Tensor], repeats: int) -> list[dict]:
    """Packed rows of text: ours, and dense attention that keeps the documents apart."""
    length = text.scores.shape[2]
    # Documents of one length are a batch: no dense form is faster.
    batch = [x.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1).contiguous() for x in inputs]
    both = T <= LONGEST_DENSE_BACKWARD
    base = measure(dense, batch, repeats, both)
    rows = [{"T": T, "work": "dense SDPA, inside documents", **base}]
    for keys in TEXT_BUDGETS:
        e, ids = text.pattern(T, keys)

        def ours(q: Tensor, k: Tensor, v: Tensor, e: Tensor = e, ids: Tensor = ids, n: int = keys) -> Tensor:
            budget = Budget(4, 256, n - 260)
            return sparse_attention(
                q, k, v, e, budget=budget, document_ids=ids, backend="triton", need_lse=False
            )[0]

        row = {"T": T, "work": f"sparse, text, {keys} keys", **measure(ours, inputs, repeats, both)}
        for key in ("forward", "both"):
            if f"{key}_ms" in row and f"{key}_ms" in base:
                row[f"{key}_ratio_inside_documents"] = base[f"{key}_ms"] / row[f"{key}_ms"]
        rows.append(row)
    return rows


def measure_backends() -> list[dict]:
    """Every backend on short and middling rows, and which of them `auto` takes."""
    rows = []
    for T, keys in CHOICES:
        budget = Budget(4, min(256, keys // 4), keys - 4 - min(256, keys // 4))
        q, k, v = (
            torch.randn(1, T, h, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for h in (HEADS, KV_HEADS, KV_HEADS)
        )
        e = eviction_time(priorities("random", T), budget)
        for lse in (False, True):
            chosen = choose_backend(q, k, budget=budget, need_lse=lse, scale=D**-0.5)
            for backend in ("reference", "sdpa", "flex", "triton"):
                if (backend == "sdpa" and lse) or (backend == "reference" and (T > 4096 or not lse)):
                    continue  # no LSE; too slow to be a choice
                if backend == "flex" and (T not in FLEX_CHOICES or keys * 2 < T or lse):
                    continue
                if backend == "flex":
                    torch.compiler.reset()

                def attend(q: Tensor, k: Tensor, v: Tensor, b: str = backend, n: bool = lse) -> Tensor:
                    return sparse_attention(q, k, v, e, budget=budget, backend=b, need_lse=n)[0]  # noqa: B023

                row = {"T": T, "keys": keys, "work": f"backend {backend}{', with LSE' if lse else ''}"}
                row |= measure(attend, [q, k, v], 5, True) | {"auto": backend == chosen}
                rows.append(row)
                print(row, flush=True)
    return rows


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


def measure_length(T: int, text: Text | None, parts: list[str]) -> list[dict]:
    """All rows of one length."""
    torch.manual_seed(0)
    # Memory order [B, T, H, D], as a model's projections leave it; dense attention has its own best.
    q, k, v = (
        torch.randn(1, T, h, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for h in (HEADS, KV_HEADS, KV_HEADS)
    )
    repeats = 3 if T > 40000 else 7
    base = measure(dense, [x.contiguous() for x in (q, k, v)], repeats, T <= LONGEST_DENSE_BACKWARD)
    rows = [{"T": T, "work": "dense SDPA", **base}]
    if "lengths" in parts:
        for pattern, deterministic in (("random", False), ("random", True), ("topics", False)):
            e = eviction_time(priorities(pattern, T), BUDGET)

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
    if text is not None and "text" in parts:
        rows += measure_text(text, T, [q, k, v], repeats)
    report(rows, T, base)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--patterns", type=Path, help="made by attention_patterns.py")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 2
    text = None if options.patterns is None else Text(options.patterns)
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "budget": BUDGET.total}
    rows: list[dict] = []

    def keep() -> None:
        if options.json:
            options.json.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")

    for T in options.lengths if {"lengths", "text"} & set(options.parts) else ():
        rows += measure_length(T, text, options.parts)
        torch.cuda.empty_cache()
        keep()
    rows += measure_backends() if "backends" in options.parts else []
    keep()
    rows += measure_float32() if "float32" in options.parts else []
    keep()
    if options.figure:
        draw(rows, options.figure)
    return 0


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.6))
    shown = [row for row in rows if "keys" not in row and "float32" not in row["work"]]
    works = list(dict.fromkeys(row["work"] for row in shown))
    colours = pyplot.get_cmap("tab20")
    for axis, key, title in zip(
        axes, ("forward_ms", "both_ms"), ("forward", "forward + backward"), strict=True
    ):
        for number, work in enumerate(works):
            points = sorted((row["T"], row[key]) for row in shown if row["work"] == work and key in row)
            if points:
                look = {"marker": "osD^v"[number % 5], "markersize": 4, "color": colours(number)}
                axis.plot(*zip(*points, strict=True), label=work, **look)
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title=title)
        axis.set_xticks(LENGTHS, [f"{T // 1024}k" for T in LENGTHS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
