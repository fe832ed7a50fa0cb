"""The real SmolLM2: engine, the library's generate with a BoundedCache, and the parallel forward agree.

Used by the slow tests and by `benchmarks/decode_agreement.py`. Everything in float32; scorers are untrained
but strengthened, so that their decisions are not those of the decay alone, and standardised on other text.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from kvpop_lightning import BoundedCache, dense, retrofit
from kvpop_lightning.data.sample import sample_text
from kvpop_lightning.generation import Engine, Sampling
from kvpop_lightning.generation.runners import make_runner
from kvpop_lightning.models import observe, replay
from kvpop_lightning.policy import NEVER, Budget

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "invariant"))
BUDGET = Budget(4, 32, 92)
GAP = 1e-3
"""Nats between the two likeliest tokens under which rounding may swap them."""


def held_out(tokenizer: Any, tokens: int) -> Tensor:
    """int64 [1, tokens] of English that no statistic comes from."""
    text = (ROOT / "LICENSE").read_text()
    return tokenizer(text, return_tensors="pt").input_ids[:, :tokens]


def with_scorer(model: Any, tokenizer: Any, scorer: str, **options: Any) -> Any:
    from invariant_checks import strengthen

    text = sample_text("mixed", seed=1, min_tokens=1200)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :1000].to(model.device)
    moments: list[dict[str, Tensor]] = []

    def keep(layer: Any) -> None:
        found = {}
        for name, x, axes in (("key", layer.key, (0, 2)), ("value", layer.value, (0, 2))):
            found[f"{name}_mean"], found[f"{name}_std"] = x.mean(axes), x.std(axes)
        moments.append(found)

    retrofit(model, BUDGET, scorer=scorer, decay=0.74, decay_step=32, seed=1, **options)
    with torch.no_grad(), dense(model), observe(model, keep):
        model(ids, use_cache=False)
    for one, found in zip(model.kvpop.scorers, moments, strict=True):
        one.set_standardization(**found)
    strengthen(model, statistics=False)
    return model.eval()


class Forced(LogitsProcessor):
    """Keeps the logits and forces the text's next token, whatever they say."""

    def __init__(self, ids: Tensor) -> None:
        self.ids, self.logits = ids, list[Tensor]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logits.append(scores.clone())
        forced = torch.full_like(scores, -math.inf)
        forced[:, self.ids[0, input_ids.shape[1]]] = 0.0
        return forced


def by_generate(model: Any, ids: Tensor) -> tuple[Tensor, BoundedCache]:
    """Logits [T - 1, V] of the tokens behind the first, from the library's `generate`, text forced."""
    cache, forced = BoundedCache(model), Forced(ids)
    model.generate(
        ids[:, :1], attention_mask=torch.ones_like(ids[:, :1]), past_key_values=cache, do_sample=False,
        max_new_tokens=ids.shape[1] - 1, logits_processor=LogitsProcessorList([forced]),
    )  # fmt: skip
    return torch.cat(forced.logits), cache


@torch.no_grad()
def by_engine(model: Any, ids: Tensor, backend: str) -> tuple[Tensor, BoundedCache]:
    """The same from the engine's runner, and what its slot held at the end."""
    runner = make_runner(model, 1, backend)
    tokens = ids[0].tolist()
    text, logits = runner.read(tokens[:1], 1)
    runner.put(0, text)
    found = [logits.clone()]
    found += [runner.step({0: token})[0].clone() for token in tokens[1:-1]]
    return torch.stack(found), runner.take(0)


def compared(ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    """Likeliest tokens of ours [T, V] against theirs, where theirs are no near-tie."""
    top = theirs.topk(2, dim=-1)
    clear = top.values[:, 0] - top.values[:, 1] > GAP
    differ = ours.argmax(-1) != top.indices[:, 0]
    return {
        "tokens": len(ours), "near_ties": int((~clear).sum()), "differ": int((differ & clear).sum()),
        "differ_in_near_ties": int((differ & ~clear).sum()),
        "largest_difference": float((ours - theirs).abs().max()),
    }  # fmt: skip


@torch.no_grad()
def teacher_forced(model: Any, ids: Tensor, backend: str = "auto") -> dict[str, Any]:
    """The three ways over one text. The parallel forward also with the cache's own evictions imposed."""
    parallel_times: list[Tensor] = []
    with observe(model, lambda layer: parallel_times.append(layer.eviction)):
        parallel = model(ids, use_cache=False).logits[0, :-1]
    library, cache = by_generate(model, ids)
    engine, left = by_engine(model, ids, backend)
    length = cache.tokens_seen
    times = [cache.eviction_times(layer) for layer in range(len(cache.layers))]
    imposed = [torch.nn.functional.pad(t, (0, ids.shape[1] - length), value=NEVER) for t in times]
    with replay(model, imposed):
        replayed = model(ids, use_cache=False).logits[0, :-1]
    other = sum(
        int((ours != torch.where(theirs[..., :length] >= length, NEVER, theirs[..., :length])).sum())
        for ours, theirs in zip(times, parallel_times, strict=True)
    )
    same_slots = all(
        torch.equal(a.position.sort(-1).values, b.position.sort(-1).values)
        for a, b in zip(cache.layers, left.layers, strict=True)
    )
    return {
        "evictions": sum(int((t != NEVER).sum()) for t in times),
        "evictions_decided_otherwise_by_parallel": other,
        "library_against_replay": compared(library, replayed),
        "library_against_parallel": compared(library, parallel),
        "engine_against_library": compared(engine, library),
        "engine_holds_the_same_tokens": same_slots,
    }


def batch_against_alone(model: Any, ids: Tensor, backend: str, new: int = 64) -> dict[str, Any]:
    """Eight prompts of different lengths side by side, and one by one: greedy tokens."""
    prompts = [
        ids[0, 7 * n : 7 * n + length].tolist() for n, length in enumerate((3, 17, 40, 90, 128, 200, 300, 5))
    ]
    settings = Sampling(max_new_tokens=new, ignore_eos=True)

    def tokens(engine: Engine, chosen: list[list[int]]) -> list[list[int]]:
        return [row[0].tokens for row in engine.generate(chosen, settings)]

    wide, one = Engine(model, slots=8, backend=backend), Engine(model, slots=1, backend=backend)
    together = tokens(wide, prompts)
    found = {
        "prompts": [len(prompt) for prompt in prompts],
        "same_engine_alone": sum(tokens(wide, [p])[0] == t for p, t in zip(prompts, together, strict=True)),
        "same_engine_reversed": tokens(wide, prompts[::-1])[::-1] == together,
        "one_slot": sum(tokens(one, [p])[0] == t for p, t in zip(prompts, together, strict=True)),
    }
    # Where one slot went another way: how near the two likeliest tokens were there.
    gaps = []
    for prompt, wanted in zip(prompts, together, strict=True):
        got = tokens(one, [prompt])[0]
        if got != wanted:
            at = next(n for n, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
            text = torch.tensor([prompt + wanted[:at]], device=model.device)
            with torch.no_grad():
                top = model(text, past_key_values=BoundedCache(model), use_cache=True).logits[0, -1].topk(2)
            gaps.append({"prompt": len(prompt), "token": at, "gap": float(top.values[0] - top.values[1])})
    return found | {"first_differences": gaps}


def long_generation(model: Any, ids: Tensor, backend: str, tokens: int) -> dict[str, Any]:
    """So many tokens from one prompt: logits finite at every step, every sink's key where and what it was."""
    engine = Engine(model, slots=1, backend=backend, beyond_positions=True)
    window, sink = model.kvpop.budget.window, model.kvpop.budget.sink
    finite, step = torch.ones((), dtype=torch.bool, device=model.device), engine.runner.step

    def watched(given: dict[int, int]) -> dict[int, Tensor]:
        nonlocal finite
        found = step(given)
        for logits in found.values():
            finite = finite & torch.isfinite(logits).all()
        return found

    engine.runner.step = watched  # type: ignore[method-assign]
    prompt = ids[0, :200].tolist()
    before = BoundedCache(model, record=False)
    with torch.no_grad():
        model(ids[:, :200].to(model.device), past_key_values=before, use_cache=True)
    settings = Sampling(max_new_tokens=tokens, temperature=1.0, seed=0, ignore_eos=True)
    (done,) = [
        piece.completion for piece in engine.stream(prompt, settings, keep=True) if piece.completion.finish
    ]
    sinks = slice(window, window + sink)
    lost = sum(
        int(((a.keys - b.keys)[:, :, sinks].abs().amax(-1) > 1e-4).sum())
        for a, b in zip(before.layers, done.kept.layers, strict=True)
    )
    return {
        "tokens": len(done.tokens), "finish": done.finish, "logits_finite": bool(finite), "sinks_lost": lost,
        "keys_held": done.kept.keys_held, "different_tokens": len(set(done.tokens[-500:])),
    }  # fmt: skip
