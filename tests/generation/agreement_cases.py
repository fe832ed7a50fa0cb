"""The real SmolLM2: engine, the library's generate with a BoundedCache, and the parallel forward agree.

Used by the slow tests and by `benchmarks/decode_agreement.py`. Everything in float32; scorers are untrained
but strengthened, so that their decisions are not those of the decay alone, and standardised on other text.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from kvpop_lightning import BoundedCache, dense, retrofit
from kvpop_lightning.data.sample import sample_text
from kvpop_lightning.generation import Engine, Sampling
from kvpop_lightning.generation.runners import GraphRunner, make_runner
from kvpop_lightning.models import observe, replay
from kvpop_lightning.policy import NEVER, Budget

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "invariant"))
from invariant_checks import Run, check_free_running, strengthen  # noqa: E402

BUDGET = Budget(4, 32, 92)
SCORERS: dict[str, dict[str, Any]] = {
    "mlp": {"scorer": "mlp", "inputs": "kv"},
    "mlstm": {"scorer": "mlstm", "memory_dim": 8, "value_dim": 16},
    "mlp, hidden": {"scorer": "mlp", "inputs": "kv_hidden"},
}
GAP = 1e-3
"""Nats between the two likeliest tokens under which rounding may swap them."""
TOLERANCE = 5e-4
"""Logits of one text with one eviction pattern, computed in two ways in float32."""


def held_out(tokenizer: Any, tokens: int) -> Tensor:
    """int64 [1, tokens] of English that no statistic comes from."""
    text = (ROOT / "LICENSE").read_text()
    return tokenizer(text, return_tensors="pt").input_ids[:, :tokens]


def with_scorer(model: Any, tokenizer: Any, scorer: str) -> Any:
    text = sample_text("mixed", seed=1, min_tokens=1200)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :1000].to(model.device)
    moments: list[dict[str, Tensor]] = []

    def keep(layer: Any) -> None:
        found = {}
        inputs = (
            ("key", layer.key, (0, 2)),
            ("value", layer.value, (0, 2)),
            ("hidden", layer.hidden, (0, 1)),
        )
        for name, x, axes in inputs:
            found[f"{name}_mean"], found[f"{name}_std"] = x.mean(axes), x.std(axes)
        moments.append(found)

    retrofit(model, BUDGET, decay=0.74, decay_step=32, seed=1, **SCORERS[scorer])
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
        self.logits.append(scores.cpu())
        forced = torch.full_like(scores, -math.inf)
        forced[:, self.ids[0, input_ids.shape[1]]] = 0.0
        return forced


def by_generate(model: Any, ids: Tensor, seconds: float | None = None) -> Run:
    """From the library's `generate`, text forced, logits [1, N, V] behind the first N tokens; N = T - 1, or
    what `seconds` allow."""
    cache, forced = BoundedCache(model), Forced(ids)
    model.generate(
        ids[:, :1], attention_mask=torch.ones_like(ids[:, :1]), past_key_values=cache, do_sample=False,
        max_new_tokens=ids.shape[1] - 1, max_time=seconds, logits_processor=LogitsProcessorList([forced]),
    )  # fmt: skip
    logits = torch.stack(forced.logits, dim=1)
    return Run(logits, [cache.eviction_times(n).cpu() for n in range(len(cache.layers))])


@torch.no_grad()
def by_engine(model: Any, ids: Tensor, backend: str, seconds: float = math.inf) -> Run:
    """The same from the engine's runner, evictions read off the tokens its slot holds after each step."""
    runner, tokens, end = make_runner(model, 1, backend), ids[0].tolist(), time.time() + seconds
    text, first = runner.read(tokens[:1], 1)
    runner.put(0, text)
    logits, last, number = [first.cpu()], None, 0
    window, sink, topk = model.kvpop.budget.window, model.kvpop.budget.sink, model.kvpop.budget.topk
    for number, token in enumerate(tokens[1:-1], start=1):
        logits.append(runner.step({0: token})[0].cpu())
        if isinstance(runner, GraphRunner):
            position = runner.state.position[:, 0].long()
        else:
            position = torch.stack([layer.position[0] for layer in runner._caches[0].layers])
        if last is None:  # the last query that saw each token
            last = position.new_zeros(*position.shape[:2], len(tokens))
        filled = min(max(number + 1 - window - sink, 0), topk)
        last.scatter_(2, position[..., :filled], number)
        if time.time() > end:
            break
    assert last is not None
    at = torch.arange(len(logits), device=last.device)
    held = torch.maximum(last[..., : len(logits)], (at + window - 1).clamp(max=number))
    held[..., :sink] = number
    times = torch.where(held == number, NEVER, held + 1).cpu()
    return Run(torch.stack(logits)[None], list(times[:, None]))


def part(run: Run, tokens: int) -> Run:
    """Of its first `tokens` tokens."""

    def cut(times: Tensor) -> Tensor:
        times = times[..., :tokens]
        return torch.where(times >= tokens, NEVER, times)

    priorities = None if run.priorities is None else [one[..., :tokens] for one in run.priorities]
    return Run(run.logits[:, :tokens], [cut(one) for one in run.evictions], priorities)


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


def against_parallel(model: Any, ids: Tensor, run: Run, parallel: Run) -> dict[str, Any]:
    """A decoder against the parallel forward: with the decoder's own evictions imposed on it, and free."""
    tokens = run.logits.shape[1]
    with torch.no_grad(), replay(model, [one.to(ids.device) for one in run.evictions]):
        replayed = model(ids[:, :tokens], use_cache=False).logits[0].cpu()
    free = part(parallel, tokens)
    found: dict[str, Any] = {
        "evictions": sum(int((one != NEVER).sum()) for one in run.evictions),
        "replayed": compared(run.logits[0], replayed),
        "free": compared(run.logits[0], free.logits[0]) | {
            "evictions_at_other_queries": others(run, free)[0]
        },
    }  # fmt: skip
    if found["replayed"]["largest_difference"] > TOLERANCE:
        # Rounding in one of the two: the same forward in float64 says in which.
        exact = replayed_in_float64(model, ids[:, :tokens], run)
        found["replayed_float64"] = compared(run.logits[0].double(), exact)
        found["parallel_to_float64"] = float((replayed - exact).abs().max())
    try:
        ties = check_free_running(free, run, TOLERANCE)
        found["free"] |= {
            "first_other_decision": ties.first, "decisions_until_then": ties.decisions,
            "near_ties_until_then": ties.near_ties,
        }  # fmt: skip
    except AssertionError as error:
        found["free"]["violation"] = str(error)
    return found


@torch.no_grad()
def replayed_in_float64(model: Any, ids: Tensor, run: Run) -> Tensor:
    """Logits [T, V] of the parallel forward under the run's evictions, weights and all else in float64."""
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.dtype for tensor in tensors]
    model.double()
    try:
        with replay(model, [one.to(ids.device) for one in run.evictions]):
            logits: Tensor = model(ids, use_cache=False).logits[0].cpu()
    finally:
        for tensor, dtype in zip([*model.parameters(), *model.buffers()], before, strict=True):
            tensor.data = tensor.data.to(dtype)
    return logits


def others(a: Run, b: Run) -> tuple[int, int]:
    """Evictions at other queries, and the first of those queries (the text's length if there is none)."""
    count, first = 0, a.logits.shape[1]
    for ours, theirs in zip(a.evictions, b.evictions, strict=True):
        differs = ours != theirs
        count += int(differs.sum())
        if differs.any():
            first = min(first, int(torch.minimum(ours, theirs)[differs].min()))
    return count, first


def between(ours: Run, theirs: Run) -> dict[str, Any]:
    """Two decoders over the same text: all tokens, and those before the first decision taken otherwise."""
    tokens = min(ours.logits.shape[1], theirs.logits.shape[1])
    ours, theirs = part(ours, tokens), part(theirs, tokens)
    count, first = others(ours, theirs)
    found = compared(ours.logits[0], theirs.logits[0])
    found |= {"evictions_at_other_queries": count, "first_other_decision": first}
    if first:
        found["until_then"] = compared(ours.logits[0, :first], theirs.logits[0, :first])
    return found


def batch_against_alone(model: Any, ids: Tensor, backend: str, new: int = 64) -> dict[str, Any]:
    """Eight prompts of different lengths side by side, and one by one: greedy tokens."""
    prompts = [
        ids[0, 7 * n : 7 * n + length].tolist() for n, length in enumerate((3, 17, 40, 90, 128, 200, 300, 5))
    ]
    settings = Sampling(max_new_tokens=new, ignore_eos=True)

    def tokens(engine: Engine, chosen: list[list[int]]) -> list[list[int]]:
        return [row[0].tokens for row in engine.generate(chosen, settings)]

    wide, one = Engine(model, slots=8, backend=backend), Engine(model, slots=1, backend=backend)
    together, alone = tokens(wide, prompts), tokens(one, prompts)
    found: dict[str, Any] = {
        "prompts": [len(prompt) for prompt in prompts],
        "new_tokens": new,
        "same_engine_alone": sum(tokens(wide, [p])[0] == t for p, t in zip(prompts, together, strict=True)),
        "same_engine_reversed": tokens(wide, prompts[::-1])[::-1] == together,
        "one_slot": sum(a == t for a, t in zip(alone, together, strict=True)),
    }
    # Where one slot went another way: how near the two likeliest tokens were there.
    gaps = []
    for prompt, wanted, got in zip(prompts, together, alone, strict=True):
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
    pairs = list(zip(before.layers, done.kept.layers, strict=True))
    lost = sum(int(((a.keys - b.keys)[:, :, sinks].abs().amax(-1) > 1e-4).sum()) for a, b in pairs)
    return {
        "tokens": len(done.tokens), "positions": model.config.max_position_embeddings,
        "last_position": done.position, "finish": done.finish, "logits_finite": bool(finite),
        "sinks_lost": lost, "sinks": sum(a.keys[:, :, sinks].shape[1] * sink for a, _ in pairs),
        "keys_held": done.kept.keys_held, "different_tokens": len(set(done.tokens[-500:])),
    }  # fmt: skip


def violations(name: str, found: dict[str, Any]) -> list[str]:
    """What is not as it must be in the result of one part, for the tests and the report.

    A decoder and the parallel forward with that decoder's own evictions imposed: the same logits within 5e-4
    (where it rounds worse than that, of its float64 form) and the same likeliest token unless two are nearer
    than 1e-3. Free: the first decision taken otherwise lies between priorities nearer than 1e-3 nats, and the
    logits agree up to there. From then on later layers see another text, so tokens are only counted.
    """
    wrong = []

    def need(fine: bool, what: str) -> None:
        if not fine:
            wrong.append(f"{name}: {what}")

    if "replayed" in found:
        replayed, free = found.get("replayed_float64", found["replayed"]), found["free"]
        need(found["evictions"] > 50 * replayed["tokens"], f"only {found['evictions']} evictions")
        need(replayed["differ"] == 0, f"{replayed['differ']} tokens differ under the same evictions")
        need(replayed["largest_difference"] < TOLERANCE, f"logits {replayed['largest_difference']:.1e} off")
        need(replayed["near_ties"] < replayed["tokens"] / 50, f"{replayed['near_ties']} near-ties")
        need("violation" not in free, free.get("violation", ""))
    elif "until_then" in found:
        until = found["until_then"]
        need(until["differ"] == 0, f"{until['differ']} tokens differ before another decision")
        need(until["largest_difference"] < TOLERANCE, f"logits {until['largest_difference']:.1e} off")
    elif "same_engine_alone" in found:
        need(found["same_engine_alone"] == len(found["prompts"]), "texts depend on what runs beside them")
        need(found["same_engine_reversed"], "texts depend on the order of the requests")
        need(all(one["gap"] < 1e-2 for one in found["first_differences"]), "another text than in one slot")
    elif "sinks_lost" in found:
        need(found["logits_finite"], "logits are not finite")
        need(found["sinks_lost"] == 0, f"{found['sinks_lost']} sinks lost")
        need(found["keys_held"] == BUDGET.total, f"{found['keys_held']} keys held")
        need(found["different_tokens"] > 5, "the text is one of a few tokens")
    return wrong
