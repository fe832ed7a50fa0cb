"""Stepwise rules in a model: the bounded cache and the parallel forward make the same decisions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from kvpop_lightning import BoundedCache, dense, retrofit
from kvpop_lightning.baselines import build_policy, get, retention_map
from kvpop_lightning.models import load, observe, tiny_model
from kvpop_lightning.policy import NEVER, Budget
from kvpop_lightning.policy.memory import equal_bytes_budget
from kvpop_lightning.policy.scorers import build_scorer, scorer_types

BUDGET = Budget(2, 4, 5)
STEPWISE = [
    kind
    for kind in scorer_types()
    if build_scorer(kind, num_heads=1, head_dim=2, hidden_size=2, window=1).stepwise
]
TIGHT = 1e-8


# A prompt shorter than the tests' texts, so that it is cut inside them.
OPTIONS: dict[str, dict] = {"snapkv": {"prompt_length": 17, "observed": 4, "pool": 3}}


def make(name: str, family: str = "llama", *, group: int = 3, budget: Budget = BUDGET, dtype=torch.float64):
    model = tiny_model(family, kv_heads=2, group=group, seed=group)
    return retrofit(model, budget, policy=name, **OPTIONS.get(name, {})).to(dtype)


def batch(length: int = 40) -> tuple[Tensor, Tensor]:
    """No padding, left, right, and on both sides with a hole."""
    ids = torch.randint(3, 272, (4, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones(4, length, dtype=torch.long)
    mask[1, :11] = 0
    mask[2, -9:] = 0
    mask[3, :3] = 0
    mask[3, -4:] = 0
    return ids.masked_fill(mask == 0, 0), mask


@torch.no_grad()
def parallel(model, ids: Tensor, mask: Tensor | None = None, **options) -> tuple[Tensor, list[Tensor]]:
    times: list[Tensor] = []
    with observe(model, lambda layer: times.append(layer.eviction)):
        logits = model(ids, attention_mask=mask, use_cache=False, **options).logits
    return logits, times


@torch.no_grad()
def decode(cache: BoundedCache, model, ids: Tensor, mask: Tensor | None, size: int) -> Tensor:
    parts = []
    for start in range(0, ids.shape[1], size):
        stop = start + size
        part = None if mask is None else mask[:, :stop]
        parts.append(model(ids[:, start:stop], attention_mask=part, past_key_values=cache).logits)
    return torch.cat(parts, 1)


def by_token(times: Tensor, real: Tensor) -> Tensor:
    """One row's eviction times [H, T] by column -> [H, N] by real token."""
    token = real.long().cumsum(0) - 1
    part = times[:, real]
    return torch.where(part == NEVER, NEVER, token[part.clamp(max=len(token) - 1)])


@pytest.mark.parametrize("name", STEPWISE)
@pytest.mark.parametrize(("family", "group"), [("llama", 1), ("qwen3", 3), ("mistral", 4)])
def test_cache_is_the_parallel_forward(name: str, family: str, group: int) -> None:
    """Steps, chunks that end anywhere, a whole prompt; padding left, right and on both sides in one batch."""
    model = make(name, family, group=group)
    ids, mask = batch()
    logits, times = parallel(model, ids, mask)
    for size in (1, 7, 40):
        cache = BoundedCache(model, chunk=16)
        got = decode(cache, model, ids, mask, size)
        real = mask != 0
        torch.testing.assert_close(got[real], logits[real], atol=TIGHT, rtol=0)
        for layer, expected in enumerate(times):
            found = cache.eviction_times(layer)
            assert cache.layers[layer].keys.shape[2] == BUDGET.total
            for row in range(4):
                count = int(real[row].sum())
                assert torch.equal(found[row, :, :count], by_token(expected[row], real[row]))
    with torch.no_grad(), dense(model):
        full = model(ids, attention_mask=mask, use_cache=False).logits
    assert (full - logits)[real].abs().max() > 1e-2, "the rule must matter"


@pytest.mark.parametrize("name", STEPWISE)
def test_packed_documents_are_as_alone(name: str) -> None:
    model = make(name)
    lengths = (23, 1, 17)
    ids = torch.randint(3, 272, (1, sum(lengths)), generator=torch.Generator().manual_seed(2))
    packed, _ = parallel(model, ids, position_ids=torch.cat([torch.arange(n) for n in lengths])[None])
    start = 0
    for length in lengths:
        alone = decode(BoundedCache(model), model, ids[:, start : start + length], None, 5)
        torch.testing.assert_close(packed[:, start : start + length], alone, atol=TIGHT, rtol=0)
        start += length


@pytest.mark.parametrize("name", STEPWISE)
def test_reset_reorder_and_copy(name: str) -> None:
    """Nothing of one text reaches the next; rows may be exchanged, doubled, and gone on from twice."""
    model = make(name)
    ids, _ = batch(30)
    fresh = BoundedCache(model)
    expected = decode(fresh, model, ids[:2], None, 4)
    used = BoundedCache(model)
    decode(used, model, ids[2:].flip(1), None, 6)
    used.reset()
    assert torch.equal(decode(used, model, ids[:2], None, 4), expected)
    half = BoundedCache(model)
    decode(half, model, ids[:2, :20], None, 4)
    twin = copy.deepcopy(half)
    half.reorder_cache(torch.tensor([1, 0]))
    swapped = decode(half, model, ids[:2, 20:].flip(0), None, 4)
    torch.testing.assert_close(swapped.flip(0), expected[:, 20:], atol=TIGHT, rtol=0)
    twin.batch_repeat_interleave(2)
    doubled = decode(twin, model, ids[:2, 20:].repeat_interleave(2, 0), None, 4)
    torch.testing.assert_close(doubled[::2], expected[:, 20:], atol=TIGHT, rtol=0)
    torch.testing.assert_close(doubled[1::2], expected[:, 20:], atol=TIGHT, rtol=0)


@pytest.mark.parametrize("name", STEPWISE)
def test_map_of_a_layer_is_what_the_model_does(name: str) -> None:
    model = make(name)
    ids, mask = batch()
    seen = []
    with torch.no_grad(), observe(model, seen.append):
        model(ids, attention_mask=mask, use_cache=False)
    first = seen[0]
    options = dict(OPTIONS.get(name, {}))
    if get(name).reads_rope:
        options["inv_freq"] = model.model.rotary_emb.inv_freq.tolist()
    if name == "retention_gate":
        options = {"policy": model.kvpop, "hidden": first.hidden}
    kept = retention_map(
        name, first.query, first.key, first.value, budget=BUDGET, document_ids=first.document_ids, **options
    )
    column = torch.arange(40)
    expected = (column <= column[:, None]) & (column[:, None] < first.eviction[:, :, None])
    real = (mask != 0)[:, None]
    assert torch.equal(kept, expected & real[..., None, :] & real[..., :, None])


@pytest.mark.parametrize("name", STEPWISE)
def test_bytes_are_those_of_the_tensors(name: str) -> None:
    """What is stated is what is allocated, and at equal bytes no rule holds more than a stateless one."""
    model = make(name, dtype=torch.float32)
    cache = BoundedCache(model)
    decode(cache, model, batch(20)[0][:1], None, 12)
    assert cache.bytes_held() == model.kvpop.bytes_per_sequence(element_bytes=4)
    assert cache.bytes_held(element_bytes=2) == model.kvpop.bytes_per_sequence()
    shape = {"num_layers": 3, "num_heads": 2, "head_dim": 16, "hidden_size": 8}
    budget = Budget(4, 32, 292)
    plain = build_policy("streaming_llm", budget, **shape).bytes_per_sequence()
    matched = build_policy(name, budget, match_bytes=True, **shape)
    assert matched.bytes_per_sequence() <= plain
    assert matched.budget.total <= budget.total
    one_more = Budget(4, 32, matched.budget.topk + 1)
    if one_more.total <= budget.total:
        assert build_policy(name, one_more, **shape).bytes_per_sequence() > plain
    with pytest.raises(ValueError, match=r"raise budget\.topk|cannot pay"):
        equal_bytes_budget(Budget(40, 32, 1), build_policy(name, budget, **shape).layer_scorer(0))


@pytest.mark.parametrize("decode_by", ["tova_head", "h2o"])
def test_prompts_of_their_own_length_in_a_batch(decode_by: str) -> None:
    """Each row as if it were alone with its own prompt length; one is below the budget."""
    lengths = [17, 11, 6, 25]
    options = {"observed": 4, "pool": 3, "decode": decode_by}

    def snapkv(prompt_length):
        model = tiny_model("llama", kv_heads=2, group=3, seed=3)
        return retrofit(model, BUDGET, policy="snapkv", prompt_length=prompt_length, **options).double()

    ids, mask = batch(44)
    real = mask != 0
    model = snapkv(torch.tensor(lengths))
    whole, _ = parallel(model, ids, mask)
    together = [decode(BoundedCache(model, chunk=16), model, ids, mask, size) for size in (1, 9, 44)]
    for row, length in enumerate(lengths):
        alone = snapkv(length)
        expected, _ = parallel(alone, ids[row : row + 1, real[row]])
        for found in (whole, *together):
            torch.testing.assert_close(found[row, real[row]], expected[0], atol=TIGHT, rtol=0)
    # Rows keep their own when they change places, and the next batch may have others.
    cache = BoundedCache(model)
    decode(cache, model, ids[:, :14], mask[:, :14], 5)
    cache.reorder_cache(torch.tensor([3, 1, 0, 2]))
    order = [3, 1, 0, 2]
    rest = model(ids[order, 14:], attention_mask=mask[order], past_key_values=cache).logits
    found, wanted = (x[real[order, 14:]] for x in (rest, whole[order, 14:]))
    torch.testing.assert_close(found, wanted, atol=TIGHT, rtol=0)
    cache.reset()
    for scorer in model.kvpop.scorers:
        scorer.prompt_length = lengths[::-1]
    again = decode(cache, model, ids.flip(0), mask.flip(0), 7)
    torch.testing.assert_close(again.flip(0)[real], whole[real], atol=TIGHT, rtol=0)
    assert cache.bytes_held() == 4 * model.kvpop.bytes_per_sequence(element_bytes=8, real_bytes=8)
    with pytest.raises(ValueError, match="prompt_length names 4 rows, but the batch has 2"):
        decode(BoundedCache(model), model, ids[:2], None, 7)
    with pytest.raises(ValueError, match="prompt_length names 4 rows, but the batch has 2"):
        parallel(model, ids[:2])
    for wrong in (0, [], [4, 0], [True], 2.5):
        with pytest.raises((ValueError, TypeError), match=r"prompt_length|iterable"):
            build_scorer("snapkv", num_heads=1, head_dim=2, hidden_size=1, prompt_length=wrong)


def test_layer_wide_state_is_kept_once() -> None:
    model = make("tova", dtype=torch.float32)
    cache = BoundedCache(model)
    decode(cache, model, batch(12)[0][:1], None, 12)
    layer = cache.layers[0]
    assert layer.position.shape == (1, 1, BUDGET.total)
    assert layer.tensors()["note.attention"].shape == (1, 1, BUDGET.total)


@pytest.mark.parametrize("name", STEPWISE)
def test_generate_save_and_load(name: str, tmp_path) -> None:
    model = make(name, dtype=torch.float32)
    ids, mask = batch(24)
    out = model.generate(
        ids[:2], attention_mask=mask[:2], max_new_tokens=6, do_sample=False, min_new_tokens=6
    )
    alone = model.generate(ids[1:2, 11:], max_new_tokens=6, do_sample=False, min_new_tokens=6)
    assert torch.equal(out[1, -6:], alone[0, -6:]), "left padding changed the tokens"
    model.save_pretrained(tmp_path)
    again = load(tmp_path, base=tiny_model("llama", kv_heads=2, group=3, seed=3))
    assert again.kvpop.to_dict() == model.kvpop.to_dict()
    assert torch.equal(parallel(again, ids, mask)[0], parallel(model, ids, mask)[0])


def test_half_precision_model() -> None:
    model = make("h2o", dtype=torch.bfloat16)
    cache = BoundedCache(model)
    out = decode(cache, model, batch(24)[0][:1], None, 5)
    assert out.dtype == torch.bfloat16
    assert cache.layers[0].tensors()["note.attention"].dtype == torch.float32


def test_a_budget_of_protected_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"protects .* raise budget\.topk"):
        retention_map("keydiff", *[torch.zeros(1, 1, 4, 2)] * 3, budget=_Bare(3, 2, 0))


class _Bare:
    """A budget without the usual checks."""

    def __init__(self, sink: int, window: int, topk: int) -> None:
        self.sink, self.window, self.topk, self.total = sink, window, topk, sink + window - 1
