"""The attention kernels against the float64 reference on random cases, on a GPU.

    python benchmarks/training_attention_checks.py [--json FILE] [--processes 12]

Outputs, LSE and the gradients of query, key and value (through both outputs) of every case; deterministic
mode twice,
bit for bit. Ends with status 1 if one case is off.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvpop_lightning.attention.reference import reference_attention
from kvpop_lightning.policy.budget import NEVER, Budget
from kvpop_lightning.policy.eviction import eviction_time

# (head dimension, query heads per KV head, dtype)
SHAPES = [
    *((D, G, "float32") for D, G in ((64, 3), (64, 1), (80, 2), (96, 4), (128, 4))),
    *((D, G, "bfloat16") for D, G in ((64, 1), (64, 3), (64, 8), (80, 4), (96, 2), (128, 1), (128, 4))),
    *((D, G, "bfloat16") for D, G in ((128, 5), (256, 2))),
    *((D, G, "float16") for D, G in ((64, 3), (80, 1), (96, 3), (128, 4), (128, 16), (256, 1))),
]  # fmt: skip
SHORT_PER_SHAPE, LONG_PER_SHAPE = 10, 2
PATTERNS = ("random", "equal", "window only", "imposed", "dense")
LAYOUTS = ("one", "one", "several", "seventy", "single tokens", "padding")
LIMITS = {"bfloat16": (6e-3, 2e-2), "float16": (1e-3, 4e-3), "float32": (2e-6, 2e-5)}
"""Relative error allowed for out and LSE, and for gradients (of rounded inputs, so the kernels' own
rounding)."""


@dataclass
class Case:
    D: int
    G: int
    dtype: str
    T: int
    B: int
    H: int
    pattern: str
    layout: str
    deterministic: bool
    lse_gradient: bool
    seed: int


def cases() -> list[list[Case]]:
    """One list per shape, so that one process compiles what it needs."""
    found = []
    for number, (D, G, dtype) in enumerate(SHAPES):
        g = torch.Generator().manual_seed(number)

        def pick(low: int, high: int, g: torch.Generator = g) -> int:
            return int(torch.randint(low, high, (), generator=g))

        group = []
        for i in range(SHORT_PER_SHAPE + LONG_PER_SHAPE):
            long = i >= SHORT_PER_SHAPE
            T = pick(8192, 9001) if long else (1, 63, 129)[i] if i < 3 else pick(2, 1700)
            group.append(
                Case(
                    D,
                    G,
                    dtype,
                    T,
                    1 if long else pick(1, 3),
                    1 if long else pick(1, 4),
                    PATTERNS[pick(0, 5)] if i % 2 else "random",
                    LAYOUTS[(number + i) % 6],
                    i % 3 == 0,
                    i % 4 != 1,
                    1000 * number + i,
                )
            )
        found.append(group)
    return found


def documents(case: Case, g: torch.Generator) -> Tensor | None:
    B, T = case.B, case.T
    if case.layout == "one":
        return None
    if case.layout == "single tokens":
        return torch.arange(T).expand(B, T).contiguous()
    if case.layout == "seventy":
        return (torch.arange(T) * 70 // max(T, 70)).expand(B, T).contiguous()
    ids = (torch.rand(B, T, generator=g) < 4 / max(T, 4)).cumsum(1)
    if case.layout == "padding":
        ids[torch.rand(B, T, generator=g) < 0.1] = -1
        ids[:, max(1, T - T // 5) :] = -1
    return ids


def times(case: Case, ids: Tensor | None, g: torch.Generator) -> Tensor:
    shape = (case.B, case.H, case.T)
    if case.pattern == "imposed":
        span = max(1, case.T // 3)
        e = torch.arange(case.T) + torch.randint(-1, span, shape, generator=g)
        e[torch.rand(shape, generator=g) < 0.1] = NEVER
        e[:, :, 0] = 0
        return e
    if case.pattern == "dense":
        return torch.full(shape, NEVER)
    if case.pattern == "window only":
        return (torch.arange(case.T) + max(1, case.T // 9)).expand(shape).contiguous()
    budget = Budget(2, max(1, case.T // 20), max(1, case.T // 8))
    p = torch.rand(shape, generator=g, dtype=torch.float64)
    return eviction_time(p if case.pattern == "random" else torch.zeros_like(p), budget, document_ids=ids)


def check(case: Case) -> dict[str, object]:
    """Relative errors of one case."""
    from kvpop_lightning.attention.triton_attention import triton_sparse_attention

    g = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    B, H, G, T, D = case.B, case.H, case.G, case.T, case.D
    # Memory order [B, T, H, D], as a model's projections leave it.
    q = torch.randn(B, T, H * G, D, generator=g).to("cuda", dtype).transpose(1, 2)
    k, v = (torch.randn(B, T, H, D, generator=g).to("cuda", dtype).transpose(1, 2) for _ in range(2))
    ids = documents(case, g)
    e = times(case, ids, g).cuda()
    ids = None if ids is None else ids.cuda()
    grad = torch.randn(q.shape, generator=g).to("cuda", dtype)
    grad_lse = torch.randn(q.shape[:3], generator=g).cuda()
    scale = 0.7 * D**-0.5

    def run(exact: bool) -> list[Tensor]:
        leaves = [(x.double() if exact else x).detach().requires_grad_() for x in (q, k, v)]
        if exact:
            out, lse = reference_attention(*leaves, e, document_ids=ids, scale=scale, query_chunk=2048)
        else:
            out, lse = triton_sparse_attention(
                *leaves, e, document_ids=ids, scale=scale, deterministic=case.deterministic
            )
        loss = (out * grad.to(out.dtype)).sum(dtype=torch.float64)
        if case.lse_gradient:
            loss = loss + (lse.masked_fill(lse.isinf(), 0.0) * grad_lse).sum(dtype=torch.float64)
        loss.backward()
        return [out.detach(), lse.detach(), *(x.grad for x in leaves if x.grad is not None)]

    got, expected = run(False), run(True)
    names = ("out", "lse", "dq", "dk", "dv")
    limits = [LIMITS[case.dtype][0]] * 2 + [LIMITS[case.dtype][1]] * 3
    errors: dict[str, float] = {}
    fine = bool((got[1].isinf() == expected[1].isinf()).all())
    for name, limit, a, b in zip(names, limits, got, expected, strict=True):
        a, b = a.double().masked_fill(b.isinf(), 0.0), b.masked_fill(b.isinf(), 0.0)
        errors[name] = float((a - b).norm() / torch.maximum(b.norm(), 0.05 * b.new_tensor(b.numel()).sqrt()))
        fine &= errors[name] <= limit  # NaN never passes
    if case.deterministic:
        fine &= all(torch.equal(a, b) for a, b in zip(got, run(False), strict=True))
    return {**asdict(case), "errors": errors, "fine": fine}


def check_group(group: list[Case]) -> list[dict[str, object]]:
    results = []
    for case in group:
        try:
            results.append(check(case))
        except Exception as error:
            results.append(
                {**asdict(case), "error": f"{type(error).__name__}: {str(error)[:300]}", "fine": False}
            )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=12)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device", file=sys.stderr)
        return 2
    began = time.time()
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes) as pool:
        results = [r for group in pool.imap(check_group, cases(), chunksize=1) for r in group]
    worst: dict[str, dict[str, float]] = {}
    for result in results:
        for name, error in result.get("errors", {}).items():  # type: ignore[attr-defined]
            row = worst.setdefault(str(result["dtype"]), {})
            row[name] = max(row.get(name, 0.0), error)
    bad = [r for r in results if not r["fine"]]
    long = sum(int(r["T"]) >= 8192 for r in results)  # type: ignore[call-overload]
    for r in bad[:12]:
        print("OFF", r)
    for dtype, row in worst.items():
        print(dtype, " ".join(f"{name} {error:.1e}" for name, error in row.items()))
    print(
        f"{len(results)} cases ({long} of 8192 tokens or more), {len(bad)} off, {time.time() - began:.0f} s"
    )
    if options.json:
        options.json.write_text(
            json.dumps({"cases": len(results), "long": long, "off": len(bad), "worst": worst})
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
