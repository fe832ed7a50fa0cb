"""The project's invariant as checks that raise: parallel forward and bounded cache are the same function.

(a) `check_equal` for float64 weights: every eviction time equal, logits within a tolerance.
(b) `check_replay` for float32: the parallel forward with the cache's own eviction times gives its logits.
(c) `check_free_running` for float32: decisions differ only in near-ties, counted; logits agree up to there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpop_lightning import BoundedCache, retrofit
from kvpop_lightning.models import observe, replay, tiny_model
from kvpop_lightning.policy import NEVER, Budget

NEAR_TIE = 1e-3
"""Nats."""

SCORERS: dict[str, dict] = {
    "linear": {"scorer": "linear"},
    "mlp": {"scorer": "mlp"},
    "mlp_hidden": {"scorer": "mlp", "inputs": "hidden"},
    "mlp_kv_hidden": {"scorer": "mlp", "inputs": "kv_hidden"},
    "mlp_no_decay": {"scorer": "mlp", "decay": 1.0},
    "mlstm_window": {"scorer": "mlstm"},
    "mlstm_0": {"scorer": "mlstm", "delay": 0},
    "mlstm_hidden": {"scorer": "mlstm", "inputs": "hidden"},
    "mlstm_kv_hidden": {"scorer": "mlstm", "inputs": "kv_hidden", "delay": 2},
    "streaming_llm": {"policy": "streaming_llm"},
    "random": {"policy": "random"},
    "random_decay": {"policy": "random+decay"},
    "key_norm": {"policy": "key_norm"},
}


def strengthen(model, gain: float = 15.0, *, statistics: bool = True) -> None:
    """Scores that differ by nats, statistics that are not 0 and 1: no check passes for want of effect."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for scorer in model.kvpop.scorers:
            for name, buffer in scorer.named_buffers() if statistics else ():
                if name.endswith("_mean"):
                    buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
                elif name.endswith("_std"):
                    buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
            for name, parameter in scorer.named_parameters():
                if name == "output_weight" or (scorer.kind == "linear" and name.endswith("_weight")):
                    parameter.mul_(gain)


def retrofitted(
    family: str = "llama",
    name: str = "mlp",
    budget: Budget | None = None,
    *,
    group: int = 3,
    dtype: torch.dtype = torch.float64,
    **more: object,
):
    """A tiny random model with a policy of `SCORERS`, scorers in the model's dtype (at least float32)."""
    model = tiny_model(family, kv_heads=2, group=group, seed=group)
    options = (
        {"decay": 0.8, "decay_step": 4, "width": 12, "memory_dim": 4, "value_dim": 6} | SCORERS[name] | more
    )
    retrofit(model, budget or Budget(2, 5, 6), seed=3, **options)
    strengthen(model)
    return model.to(dtype)


def padded_batch(length: int, *, seed: int = 0, vocab: int = 272) -> tuple[Tensor, Tensor]:
    """ids and mask [4, length]: no padding, left, right, and on both sides."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (4, length), generator=generator)
    mask = torch.ones(4, length, dtype=torch.long)
    mask[1, : length // 4] = 0
    mask[2, length - length // 3 :] = 0
    mask[3, :3] = 0
    mask[3, -4:] = 0
    return ids.masked_fill(mask == 0, 0), mask


@dataclass
class Run:
    """logits [B, T, V]; per layer the eviction times by token, int64 [B, Hkv, N], N = longest row."""

    logits: Tensor
    evictions: list[Tensor]
    priorities: list[Tensor] | None = None


def forward(model, ids: Tensor, mask: Tensor | None, **options: object) -> Tensor:
    """Logits on the CPU, wherever the model is."""
    mask = None if mask is None else mask.to(model.device)
    return model(ids.to(model.device), attention_mask=mask, **options).logits.cpu()


@torch.no_grad()
def run_parallel(model, ids: Tensor, mask: Tensor | None) -> Run:
    evictions: list[Tensor] = []
    priorities: list[Tensor] = []

    def keep(layer) -> None:
        evictions.append(by_token(layer.eviction.cpu(), mask, times=True))
        priorities.append(by_token(layer.priority.cpu(), mask))

    with observe(model, keep):
        logits = forward(model, ids, mask, use_cache=False)
    return Run(logits, evictions, priorities)


@torch.no_grad()
def run_cache(model, ids: Tensor, mask: Tensor | None, size: int, **options: object) -> Run:
    cache = BoundedCache(model, **options)
    parts = []
    for start in range(0, ids.shape[1], size):
        stop = min(start + size, ids.shape[1])
        part_mask = None if mask is None else mask[:, :stop]
        parts.append(forward(model, ids[:, start:stop], part_mask, past_key_values=cache, use_cache=True))
        assert all(layer.keys.shape[2] == model.kvpop.budget.total for layer in cache.layers)
    evictions = [cache.eviction_times(layer).cpu() for layer in range(len(cache.layers))]
    return Run(torch.cat(parts, dim=1), evictions)


def by_token(x: Tensor, mask: Tensor | None, *, times: bool = False) -> Tensor:
    """[B, H, T] by column -> [B, H, N] by real token; times (column numbers) become token numbers too."""
    if mask is None:
        return x
    real = mask != 0
    count = real.sum(1)
    result = torch.full((*x.shape[:2], int(count.max())), NEVER if times else 0, dtype=x.dtype)
    for row in range(x.shape[0]):
        part = x[row][:, real[row]]
        if times:
            token = real[row].long().cumsum(0) - 1
            part = torch.where(part == NEVER, NEVER, token[part.clamp(max=len(token) - 1)])
        result[row, :, : count[row]] = part
    return result


def by_column(times: Tensor, mask: Tensor | None) -> Tensor:
    """Inverse of `by_token` for eviction times; padding gets NEVER."""
    if mask is None:
        return times
    real = mask != 0
    result = torch.full((*times.shape[:2], mask.shape[1]), NEVER, dtype=torch.int64)
    for row in range(times.shape[0]):
        columns = real[row].nonzero()[:, 0]
        part = times[row, :, : len(columns)]
        result[row][:, columns] = torch.where(part == NEVER, NEVER, columns[part.clamp(max=len(columns) - 1)])
    return result


def real_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    return logits if mask is None else logits[mask != 0]


def assert_close(got: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    error = (got - expected).abs().max().item()
    assert error <= tolerance, f"{what} differ by {error:.2e}, more than {tolerance:.0e}"


def check_equal(model, ids, mask=None, sizes=(1, 7, 64), tolerance: float = 1e-4, **options: object) -> None:
    """(a): decisions and logits of the cache, for every chunk size, are those of the parallel forward."""
    parallel = run_parallel(model, ids, mask)
    for size in sizes:
        cached = run_cache(model, ids, mask, size, **options)
        for layer, (ours, theirs) in enumerate(zip(cached.evictions, parallel.evictions, strict=True)):
            wrong = int((ours != theirs).sum())
            assert wrong == 0, f"chunk {size}, layer {layer}: {wrong} of {ours.numel()} eviction times differ"
        assert_close(
            real_logits(cached.logits, mask),
            real_logits(parallel.logits, mask),
            tolerance,
            f"chunk {size}: logits",
        )


@torch.no_grad()
def check_replay(model, ids, mask, cached: Run, tolerance: float) -> float:
    """(b): the parallel forward with the cache's decisions imposed; returns the largest difference."""
    with replay(model, [by_column(times, mask) for times in cached.evictions]):
        logits = forward(model, ids, mask, use_cache=False)
    got, expected = real_logits(cached.logits, mask), real_logits(logits, mask)
    assert_close(got, expected, tolerance, "replayed logits")
    return (got - expected).abs().max().item()


@dataclass
class Ties:
    """What free running showed on one row."""

    decisions: int
    """Evictions made before (and at) the first query with another decision."""
    near_ties: int
    """Decisions among them that the parallel priorities would have taken otherwise."""
    first: int
    """The first such query; the length of the text if there is none."""


def check_free_running(parallel: Run, cached: Run, tolerance: float, row: int = 0) -> Ties:
    """(c) on an unpadded row: by the parallel priorities, each eviction is within a near-tie.

    From the first different decision on later layers see another text: nothing after that query is compared.
    """
    assert parallel.priorities is not None
    length = parallel.logits.shape[1]
    first = length
    for ours, theirs in zip(cached.evictions, parallel.evictions, strict=True):
        differs = ours[row] != theirs[row]
        if differs.any():
            first = min(first, int(torch.minimum(ours[row], theirs[row])[differs].min()))
    decisions = near_ties = 0
    for layer, times in enumerate(cached.evictions):
        for head in range(times.shape[1]):
            e, p = times[row, head].tolist(), parallel.priorities[layer][row, head].tolist()
            other = parallel.evictions[layer][row, head].tolist()
            for token, query in enumerate(e):
                if query > first:
                    continue
                decisions += 1
                if other[token] == query:
                    continue
                near_ties += 1
                # The parallel form kept this token here and dropped another one.
                rivals = [p[j] for j, q in enumerate(other) if q == query]
                margin = min((abs(p[token] - r) for r in rivals), default=float("inf"))
                assert margin < NEAR_TIE, (
                    f"layer {layer}, head {head}, query {query}: evicted token {token}, {margin:.2e} nats off"
                )
    if first:
        assert_close(
            cached.logits[row, :first], parallel.logits[row, :first], tolerance, "free-running logits"
        )
    return Ties(decisions, near_ties, first)
