"""What the tests of ragged caches share: texts with padding, and a cache beside the parallel form."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor

from kvpop_lightning import BoundedCache
from kvpop_lightning.models import load, observe, tiny_model
from kvpop_lightning.policy import NEVER, Budget
from kvpop_lightning.policy.ragged import keys_held

WINDOW = 5
BUDGET = Budget(0, WINDOW, 7)
TIGHT = 1e-9
# Two documents, one of a single token, padding in front, between and behind.
IDS = torch.tensor([[0] * 17 + [1] + [2] * 12, [-1] * 3 + [0] * 9 + [-1] * 2 + [0] * 6 + [3] * 7 + [-1] * 3])
LENGTH = IDS.shape[1]


def texts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 272, (4, 90), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(4, 90, dtype=torch.long)
    mask[1, :31] = 0
    mask[2, -29:] = 0
    mask[3, :3] = 0
    mask[3, -4:] = 0
    return ids.masked_fill(mask == 0, 0), mask


@torch.no_grad()
def parallel(model, ids: Tensor, mask: Tensor | None = None, **where) -> tuple[Tensor, list[Tensor]]:
    times: list[Tensor] = []
    with observe(model, lambda layer: times.append(layer.eviction)):
        return model(ids, attention_mask=mask, use_cache=False, **where).logits, times


@torch.no_grad()
def decode(cache: BoundedCache, model, ids: Tensor, mask: Tensor | None, size: int) -> Tensor:
    parts = []
    for start in range(0, ids.shape[1], size):
        part = None if mask is None else mask[:, : start + size]
        parts.append(model(ids[:, start : start + size], attention_mask=part, past_key_values=cache).logits)
    return torch.cat(parts, 1)


def cache_is_parallel(
    model, ids: Tensor, real: Tensor, mask: Tensor, logits: Tensor, times: list[Tensor]
) -> None:
    """Steps, chunks and whole prompts give the parallel form's logits [B, T, V] and eviction times, one
    [B, Hkv, T] per layer; heads differ.
    """
    for size in (1, 4, 90):
        cache = BoundedCache(model, chunk=16)
        got = decode(cache, model, ids, mask, size)
        torch.testing.assert_close(got[real], logits[real], atol=TIGHT, rtol=0)
        per_head = cache.keys_per_head()
        for layer, expected in enumerate(times):
            found = cache.eviction_times(layer)
            for row in range(4):
                token = real[row].long().cumsum(0) - 1
                here = expected[row][:, real[row]]
                here = torch.where(here == NEVER, NEVER, token[here.clamp(max=89)])
                count = int(real[row].sum())
                assert torch.equal(found[row, :, :count], here)
                assert torch.equal(per_head[layer, row], keys_held(here, count))
        assert per_head.unique().numel() > 3, "the heads' caches differ in length"
        assert cache.keys_held == int(per_head.max())


def rows_move(model) -> None:
    """Rows swapped or repeated in the middle of a text go on as they would have."""
    ids, _ = texts()
    half = BoundedCache(model)
    decode(half, model, ids[:2, :60], None, 8)
    expected = decode(copy.deepcopy(half), model, ids[:2, 60:], None, 5)
    twin = copy.deepcopy(half)
    half.reorder_cache(torch.tensor([1, 0]))
    swapped = decode(half, model, ids[:2, 60:].flip(0), None, 6)
    torch.testing.assert_close(swapped.flip(0), expected, atol=TIGHT, rtol=0)
    twin.batch_repeat_interleave(2)
    doubled = decode(twin, model, ids[:2, 60:].repeat_interleave(2, 0), None, 6)
    torch.testing.assert_close(doubled[1::2], expected, atol=TIGHT, rtol=0)


def packed_as_alone(model) -> None:
    """Documents packed into one row are as each alone through a cache."""
    ids, _ = texts()
    lengths = (40, 1, 49)
    packed, _ = parallel(model, ids[:1], position_ids=torch.cat([torch.arange(n) for n in lengths])[None])
    start = 0
    for length in lengths:
        alone = decode(BoundedCache(model), model, ids[:1, start : start + length], None, 11)
        torch.testing.assert_close(packed[:, start : start + length], alone, atol=TIGHT, rtol=0)
        start += length


def saved_is_the_same(model, folder: Path, *, with_base: bool = False) -> None:
    """A float32 policy saved and loaded gives the same bits; `with_base`: the base was saved with it."""
    ids, _ = texts()
    model.save_pretrained(folder)
    loaded = load(folder, base=None if with_base else tiny_model("llama", kv_heads=2, group=3, seed=3))
    assert torch.equal(parallel(loaded, ids)[0], parallel(model, ids)[0])
    out = model.generate(ids[:1], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert torch.equal(out, loaded.generate(ids[:1], max_new_tokens=4, min_new_tokens=4, do_sample=False))
