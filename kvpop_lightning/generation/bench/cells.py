"""One contestant at one batch, over the lengths: which path runs it, and what its steps cost."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvpop_lightning.cache import BoundedCache
from kvpop_lightning.errors import UserError
from kvpop_lightning.generation.bench import states
from kvpop_lightning.generation.bench.timing import Peak, replay_times, step_times
from kvpop_lightning.generation.runners import no_graph
from kvpop_lightning.models import is_retrofitted, retrofit, unretrofit
from kvpop_lightning.models.compat import cache_keyword
from kvpop_lightning.policy import Budget

Cell = dict[str, Any]
PATHS = {
    "graph": "fused step in one CUDA graph",
    "modules": "the library's modules on a bounded cache",
    "library": "the library's modules on its growing cache",
    "static": "the library's static cache under torch.compile",
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    lengths: tuple[int, ...]
    steps: int
    warmup: int
    chunk: int = 2048
    reduction: float = 4.0


def prepare(model: Any, contestant: str, budget: Budget, **options: Any) -> Any:
    """The model as the contestant needs it; returns its policy, None where every key is kept."""
    if contestant in ("full", "library", "static"):
        if is_retrofitted(model):
            unretrofit(model)
        return None
    retrofit(model, budget, policy=contestant, **options)
    return model.kvpop


def cells(
    model: Any, contestant: str, budget: Budget, rows: int, sizes: Sizes, **options: Any
) -> Iterator[Cell]:
    """A cell for each length: `contestant, path, rows, length`, times in ms, `tokens_per_s`, `peak_bytes`,
    `cache_bytes`; instead of them `reason` where it does not fit into memory."""
    policy = prepare(model, contestant, budget, **options)
    device = next(model.parameters()).device
    refusal = no_graph(model) if contestant not in ("library", "static") else contestant
    if contestant == "full" and device.type == "cuda":
        refusal = _no_full_graph(model)
    path = "graph" if refusal is None else contestant if contestant in ("library", "static") else "modules"
    if contestant == "full" and path != "graph":
        path = "library"
    work: dict[str, Callable[..., Iterator[Cell]]] = {
        "graph": _graph, "modules": _modules, "library": _library, "static": _static,
    }  # fmt: skip
    done = 0
    head = {"contestant": contestant, "path": path, "rows": rows}
    try:
        for cell in work[path](model, policy, rows, sizes):
            length = sizes.lengths[done]
            done += 1
            cell["tokens_per_s"] = round(1000 * rows / cell["mean_ms"], 1)
            yield head | {"length": length} | cell
    except (torch.OutOfMemoryError, UserError) as error:
        reason = "out of memory" if not isinstance(error, UserError) else str(error)
        for length in sizes.lengths[done:]:
            yield head | {"length": length, "reason": reason}
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _no_full_graph(model: Any) -> str | None:
    from kvpop_lightning.generation.fused import fused_refusal

    return fused_refusal(model)


def _graph(model: Any, policy: Any, rows: int, sizes: Sizes) -> Iterator[Cell]:
    """Without a policy each length has a cache of its own, with room for the steps."""
    from kvpop_lightning.generation.fused import FusedDecoder, capture

    room = sizes.steps + sizes.warmup + 16
    parts = [sizes.lengths] if policy is not None else [(length,) for length in sizes.lengths]
    for lengths in parts:
        budget = policy.budget if policy is not None else Budget(0, lengths[0] + room, 1)
        state = states.filled_state(model, budget, rows, lengths[0], policy)
        decoder = FusedDecoder(model, state, policy)
        graph = capture(decoder, keep=False)  # `move_to` sets what matters anew
        for length in lengths:
            states.move_to(state, length, policy)
            with Peak(model, state.nbytes) as peak:
                times = replay_times(graph, sizes.steps, sizes.warmup)
            assert bool(torch.isfinite(decoder.logits).all())
            yield times | _memory(peak, state.nbytes())
        del graph, decoder, state, peak  # the last of them holds on to the state
        gc.collect()


def _memory(peak: Peak, cache_bytes: int) -> Cell:
    return {"peak_bytes": peak.bytes, "memory": peak.kind, "cache_bytes": cache_bytes}


def _modules(model: Any, policy: Any, rows: int, sizes: Sizes) -> Iterator[Cell]:
    cache = BoundedCache(model, record=False)
    for length in sizes.lengths:
        states.advance(model, cache, rows, length, reduction=sizes.reduction, chunk=sizes.chunk)
        yield _steps(model, cache, rows, sizes, cache.bytes_held)


def _library(model: Any, policy: Any, rows: int, sizes: Sizes) -> Iterator[Cell]:
    for length in sizes.lengths:
        cache = states.dynamic_cache(model, rows, length)

        def held(cache: Any = cache) -> int:
            return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

        yield _steps(model, cache, rows, sizes, held)
        del cache


def _static(model: Any, policy: Any, rows: int, sizes: Sizes) -> Iterator[Cell]:
    """Compiled for each length anew; compiling is warm-up."""
    device = next(model.parameters()).device
    for length in sizes.lengths:
        torch._dynamo.reset()
        mode = "reduce-overhead" if device.type == "cuda" else "default"
        compiled = torch.compile(model.forward, mode=mode, dynamic=False)
        cache = states.static_cache(model, rows, length, sizes.steps + sizes.warmup + 16)
        slots = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        yield _steps(model, cache, rows, sizes, partial(int, slots), forward=compiled)
        del cache, compiled


@torch.no_grad()
def _steps(
    model: Any, cache: Any, rows: int, sizes: Sizes, held: Callable[[], int], forward: Any = None
) -> Cell:
    device = next(model.parameters()).device
    token = torch.full((rows, 1), 3, device=device)
    keyword = {cache_keyword(model): cache}

    def step() -> None:
        logits = (forward or model)(token, **keyword, use_cache=True, logits_to_keep=1).logits
        token.copy_(logits[:, -1:].argmax(-1))

    # Compiling and the first allocations are no part of a step's memory.
    step_times(step, 1, sizes.warmup, device)
    with Peak(model, held) as peak:
        times = step_times(step, sizes.steps, 0, device)
    return times | _memory(peak, held())


@torch.inference_mode()
def prompt_cell(model: Any, tokens: int, chunk: int, on_chunk: Callable[[int], None]) -> Cell:
    """Reads a random prompt of `tokens` tokens in chunks into a BoundedCache: peak memory early and at the
    end.

    `first_peak_bytes`: until the cache was full and one chunk more was read; `peak_bytes`: over the whole.
    """
    device = next(model.parameters()).device
    cache: Any = BoundedCache(model, record=False, chunk=min(chunk, 512))
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), device=device)
    enough = cache.budget.total + chunk
    first: dict[str, int] = {}

    def read() -> None:
        seen = 0
        for piece in ids.split(chunk, dim=1):
            states.read_text_rows(model, cache, piece)
            seen += piece.shape[1]
            on_chunk(seen)
            if seen >= enough and "peak" not in first:
                first["peak"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0

    with Peak(model, cache.bytes_held) as peak:
        times = step_times(read, 1, 0, device)
    return {
        "tokens": tokens, "chunk": chunk, "seconds": round(times["mean_ms"] / 1000, 2),
        "tokens_per_s": round(1000 * tokens / times["mean_ms"], 1),
        "first_peak_bytes": first.get("peak") or peak.bytes,
        "peak_bytes": peak.bytes, "memory": peak.kind, "cache_bytes": cache.bytes_held(),
        "finite": all(bool(torch.isfinite(layer.keys).all()) for layer in cache.layers),
    }  # fmt: skip


def lengths_text(lengths: Sequence[int]) -> list[str]:
    """4096 as 4k, others as they are."""
    return [f"{n // 1024}k" if n % 1024 == 0 and n else str(n) for n in lengths]
