"""Triton: matrix-vector products that stream a weight once, with what stands around them fused in.

For one row the time of a decode step is the time to read the weights; norms, SiLU and residuals ride along.
For several rows the library's matrix product is used with `norm_rows` and `silu_rows` around it.
"""

# mypy: disable-error-code="no-untyped-def, misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def vector_kernel(
    x, weight, norm, out, eps,
    OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [OUT] = (residual out) + weight [OUT, IN] . rms_norm(x [IN]); grid (OUT / ROWS)."""
    n = tl.arange(0, ROWS)
    first = tl.program_id(0) * ROWS
    inside = first + n < OUT
    weight += tl.program_id(0).to(tl.int64) * (ROWS * IN)
    k = tl.arange(0, BLOCK)
    work: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    acc = tl.zeros([ROWS, BLOCK], work)
    square = tl.zeros([BLOCK], work)
    if PDL:
        # The weight does not depend on the kernel before: its first tile is on its way while that one ends.
        tile = tl.load(
            weight + n[:, None] * IN + k[None, :], mask=inside[:, None] & (k < IN)[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        v = tl.load(x + k, mask=k < IN, other=0.0).to(work)
        if HAS_NORM:
            square += v * v
            v *= tl.load(norm + k, mask=k < IN, other=0.0).to(work)
        acc += tile.to(work) * v[None, :]
    for start in range(BLOCK if PDL else 0, IN, BLOCK):
        at = start + k
        tile = tl.load(
            weight + n[:, None] * IN + at[None, :], mask=inside[:, None] & (at < IN)[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        v = tl.load(x + at, mask=at < IN, other=0.0).to(work)
        if HAS_NORM:
            square += v * v
            v *= tl.load(norm + at, mask=at < IN, other=0.0).to(work)
        acc += tile.to(work) * v[None, :]
    result = tl.sum(acc, axis=1)
    if HAS_NORM:
        result *= 1.0 / tl.sqrt(tl.sum(square, axis=0) / IN + eps)
    if RESIDUAL:
        # The library adds two tensors of the model's dtype.
        result = result.to(x.dtype.element_ty).to(work) + tl.load(out + first + n, mask=inside).to(work)
    tl.store(out + first + n, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_kernel(
    x, gate, up, norm, out, eps,
    OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [OUT] = silu(gate . rms_norm(x)) * (up . rms_norm(x)); gate, up [OUT, IN]."""
    n = tl.arange(0, ROWS)
    first = tl.program_id(0) * ROWS
    inside = first + n < OUT
    gate += tl.program_id(0).to(tl.int64) * (ROWS * IN)
    up += tl.program_id(0).to(tl.int64) * (ROWS * IN)
    k = tl.arange(0, BLOCK)
    work: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    acc_gate = tl.zeros([ROWS, BLOCK], work)
    acc_up = tl.zeros([ROWS, BLOCK], work)
    square = tl.zeros([BLOCK], work)
    if PDL:
        where = n[:, None] * IN + k[None, :]
        mask = inside[:, None] & (k < IN)[None, :]
        tile_gate = tl.load(gate + where, mask=mask, other=0.0, eviction_policy="evict_first")
        tile_up = tl.load(up + where, mask=mask, other=0.0, eviction_policy="evict_first")
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
        v = tl.load(x + k, mask=k < IN, other=0.0).to(work)
        square += v * v
        v *= tl.load(norm + k, mask=k < IN, other=0.0).to(work)
        acc_gate += tile_gate.to(work) * v[None, :]
        acc_up += tile_up.to(work) * v[None, :]
    for start in range(BLOCK if PDL else 0, IN, BLOCK):
        at = start + k
        where = n[:, None] * IN + at[None, :]
        mask = inside[:, None] & (at < IN)[None, :]
        tile_gate = tl.load(gate + where, mask=mask, other=0.0, eviction_policy="evict_first")
        tile_up = tl.load(up + where, mask=mask, other=0.0, eviction_policy="evict_first")
        v = tl.load(x + at, mask=at < IN, other=0.0).to(work)
        square += v * v
        v *= tl.load(norm + at, mask=at < IN, other=0.0).to(work)
        acc_gate += tile_gate.to(work) * v[None, :]
        acc_up += tile_up.to(work) * v[None, :]
    r = 1.0 / tl.sqrt(tl.sum(square, axis=0) / IN + eps)
    a = tl.sum(acc_gate, axis=1) * r
    b = tl.sum(acc_up, axis=1) * r
    tl.store(out + first + n, (a / (1.0 + tl.exp(-a)) * b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_rows(x, norm, out, eps, IN: tl.constexpr, IN_P: tl.constexpr):
    """out [rows, IN] = rms_norm(x); grid (rows)."""
    at = tl.program_id(0) * IN + tl.arange(0, IN_P)
    inside = tl.arange(0, IN_P) < IN
    kind = x.dtype.element_ty
    work: tl.constexpr = tl.float64 if kind == tl.float64 else tl.float32
    v = tl.load(x + at, mask=inside, other=0.0).to(work)
    r = 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / IN + eps)
    w = tl.load(norm + tl.arange(0, IN_P), mask=inside, other=0.0).to(work)
    tl.store(out + at, ((v * r).to(kind).to(work) * w).to(kind), mask=inside)


@triton.jit
def silu_rows(x, out, OUT: tl.constexpr, BLOCK: tl.constexpr):
    """out [rows, OUT] = silu(x[:, :OUT]) * x[:, OUT:]; grid (OUT / BLOCK, rows)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < OUT
    row = tl.program_id(1)
    work: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    a = tl.load(x + row * (2 * OUT) + at, mask=inside, other=0.0).to(work)
    b = tl.load(x + row * (2 * OUT) + OUT + at, mask=inside, other=0.0).to(work)
    tl.store(out + row * OUT + at, (a / (1.0 + tl.exp(-a)) * b).to(out.dtype.element_ty), mask=inside)
