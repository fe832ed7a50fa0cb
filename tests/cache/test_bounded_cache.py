"""What the cache holds, keeps and forgets (Failures that peers report, number 3 to 7)."""

from __future__ import annotations

import copy

import pytest
import torch
from layer_harness import HID, feed, make_cache, make_policy, random_text

from kvpop_lightning.policy import NEVER, Budget


def storage(cache) -> dict[str, tuple[int, int]]:
    """Address and bytes of every tensor the cache keeps."""
    return {
        f"{index}.{name}": (tensor.data_ptr(), tensor.numel() * tensor.element_size())
        for index, layer in enumerate(cache.layers)
        for name, tensor in layer.tensors().items()
    }


def expected_bytes(
    policy, batch: int, *, heads: int = 2, dim: int = 6, element: int = 8, real: int = 8
) -> int:
    """METHOD.md, section 5 for one layer; here a float64 run with float64 scores."""
    budget, scorer = policy.budget, policy.scorers[0]
    per_head = budget.total * 2 * dim * element + (real + 8) * budget.topk + real * budget.window
    per_head += scorer.state_bytes(real)
    inputs = element * HID * budget.window if scorer.needs_hidden and scorer.delay else 0
    return batch * (heads * per_head + inputs)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mlp", {}),
        ("mlp", {"inputs": "hidden"}),
        ("mlstm", {}),
        ("mlstm", {"inputs": "kv_hidden"}),
        ("mlstm", {"delay": 0}),
    ],
)
def test_allocated_once_and_by_the_formula(kind: str, options: dict) -> None:
    """Bytes, not counts: the memory is the formula's from the first token on and never moves."""
    policy = make_policy(kind, Budget(2, 4, 5), **options)
    cache = make_cache(policy, record=False)
    text = random_text(60, batch=3)
    first = tuple(x[:, :, :1] if x.dim() == 4 else x[:, :1] for x in text)
    feed(cache, first, [1])
    before, allocated = cache.bytes_held(), storage(cache)
    assert before == expected_bytes(policy, 3)
    assert cache.layers[0].keys.shape == (3, 2, 11, 6)  # two KV heads, although six query heads read them
    rest = tuple(x[:, :, 1:] if x.dim() == 4 else x[:, 1:] for x in text)
    for size in ([1], [13]):
        feed(cache, rest, size)
        assert storage(cache) == allocated
        assert cache.bytes_held() == before
    kept = [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, torch.Tensor)]
    assert sum(t.untyped_storage().nbytes() for t in kept if t.dim() == 4) == 2 * 3 * 2 * 11 * 6 * 8


def test_bytes_at_two_per_element() -> None:
    policy = make_policy("mlp", Budget(2, 4, 5))
    cache = make_cache(policy)
    feed(cache, random_text(3), [3])
    assert cache.bytes_held(element_bytes=2) == expected_bytes(policy, 1, element=2)
    cache.reset()
    assert cache.bytes_held() == expected_bytes(policy, 1)  # the slots stay


def test_peak_memory_of_a_prompt_does_not_grow_with_it() -> None:
    """The largest tensor made while one long prompt goes in at once is bounded by the inner split."""
    largest = {}
    for length in (128, 512):
        cache = make_cache(make_policy("mlp", Budget(2, 4, 5)), chunk=16, record=False)
        text = random_text(length, group=1)
        seen = [0]

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, seen=seen):
                out = func(*args, **(kwargs or {}))
                for tensor in out if isinstance(out, (list, tuple)) else [out]:
                    if isinstance(tensor, torch.Tensor) and not tensor._is_view():
                        seen[0] = max(seen[0], tensor.numel())
                return out

        cache.begin(1, length)
        with Watch():
            cache.attend(0, *text[:3], text[3], 0.5)
        largest[length] = seen[0]
    assert largest[512] <= max(largest[128], 512 * 2 * 6)  # only the output [1, 2, T, 6] itself may grow
    assert largest[512] < 512 * 128


@pytest.mark.parametrize("kind", ["mlp", "mlstm"])
def test_reset_forgets_everything(kind: str) -> None:
    """A text gives the same answer whatever came before it, longer or shorter, in more rows or fewer."""
    policy = make_policy(kind)
    a, b = random_text(43, batch=2, seed=1), random_text(17, batch=3, seed=2)
    fresh = {}
    for name, text in (("a", a), ("b", b)):
        cache = make_cache(policy)
        fresh[name] = (feed(cache, text, [9]), cache.eviction_times(0))
    cache = make_cache(policy)
    for name in "abaab":
        cache.reset()
        out = feed(cache, {"a": a, "b": b}[name], [9])
        assert torch.equal(out, fresh[name][0])
        assert torch.equal(cache.eviction_times(0), fresh[name][1])
    assert cache.tokens_seen == 17
    assert cache.get_seq_length() == 17


def test_reset_keeps_the_allocation_when_the_next_batch_fits() -> None:
    cache = make_cache(make_policy("mlstm"))
    feed(cache, random_text(9, batch=3), [9])
    allocated = storage(cache)
    cache.reset(batch_size=2)
    feed(cache, random_text(9, batch=2), [4])
    assert storage(cache) == allocated
    assert cache.layers[0].keys.shape[0] == 2
    cache.reset(batch_size=4)
    assert cache.bytes_held() == 0
    feed(cache, random_text(9, batch=4), [4])
    assert cache.layers[0].keys.shape[0] == 4


@pytest.mark.parametrize("kind", ["mlp", "mlstm"])
@pytest.mark.parametrize("how", ["reorder", "select", "mask", "repeat"])
def test_rows_can_be_chosen(kind: str, how: str) -> None:
    """Beams: after rows were exchanged, every row goes on as if it had always stood there."""
    policy = make_policy(kind, inputs="kv_hidden")
    start, rest = random_text(23, batch=3, seed=3), random_text(19, batch=1, seed=4)
    choice = {"reorder": [2, 0, 0], "select": [1, 2], "mask": [0, 2], "repeat": [0, 0, 1, 1, 2, 2]}[how]
    cache = make_cache(policy)
    mask = torch.ones(3, 23, dtype=torch.bool)
    mask[2, :5] = False
    feed(cache, start, [8], mask)
    address = cache.layers[0].keys.data_ptr()
    if how == "reorder":
        cache.reorder_cache(torch.tensor(choice))
        assert cache.layers[0].keys.data_ptr() == address  # in place
    elif how == "select":
        cache.batch_select_indices(torch.tensor(choice))
    elif how == "mask":
        cache.batch_select_indices(torch.tensor([True, False, True]))
    else:
        cache.batch_repeat_interleave(2)
    assert cache.tokens_per_row.tolist() == [[23, 23, 18][row] for row in choice]
    more = tuple(x.expand(len(choice), *x.shape[1:]) for x in rest)
    whole_mask = torch.cat([mask[choice], torch.ones(len(choice), 19, dtype=torch.bool)], dim=1)
    out = []
    for start_column in range(0, 19, 4):
        cut = slice(start_column, min(start_column + 4, 19))
        part = tuple(x[:, :, cut] if x.dim() == 4 else x[:, cut] for x in more)
        cache.begin(len(choice), part[0].shape[2], whole_mask[:, : 23 + cut.stop])
        out.append(cache.attend(0, *part, 0.5))
    got, times = torch.cat(out, 2), cache.eviction_times(0)
    straight = make_cache(policy)
    text = tuple(
        torch.cat([x[choice], y], dim=2 if x.dim() == 4 else 1) for x, y in zip(start, more, strict=True)
    )
    expected = feed(straight, text, [6], whole_mask)
    torch.testing.assert_close(got, expected[:, :, 23:], atol=1e-12, rtol=0)
    assert torch.equal(times, straight.eviction_times(0))


def test_no_later_token_changes_an_earlier_output() -> None:
    """Chunked prefill must not peek: a changed token leaves the outputs before it bit-equal."""
    policy = make_policy("mlstm", delay=0)
    text = random_text(30)
    changed = tuple(x.clone() for x in text)
    for x in changed[1:3]:
        x[:, :, 21] += 1.0
    before, after = (feed(make_cache(policy), t, [30]) for t in (text, changed))
    assert torch.equal(before[:, :, :21], after[:, :, :21])
    assert not torch.allclose(before[:, :, 21], after[:, :, 21])


def test_two_counters() -> None:
    """Columns are what `generate` counts, tokens what drives the policy."""
    cache = make_cache(make_policy("mlp"))
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :7] = False
    feed(cache, random_text(20, batch=2), [6], mask)
    assert cache.get_seq_length() == 20
    assert cache.get_mask_sizes(3, 0) == (23, 0)
    assert cache.tokens_per_row.tolist() == [13, 20]
    assert cache.tokens_seen == 20
    assert cache.keys_held == 11
    assert cache.get_max_length() == -1
    position = cache.begin(2, 2, torch.cat([mask, torch.ones(2, 2, dtype=torch.bool)], 1))
    assert position.tolist() == [[13, 14], [20, 21]]


@pytest.mark.parametrize("kind", ["mlp", "mlstm"])
def test_a_copy_goes_its_own_way(kind: str) -> None:
    """A prompt read once serves several continuations; the copy belongs to the same model."""
    policy = make_policy(kind)
    start, one, two = random_text(20), random_text(15, seed=1), random_text(11, seed=2)
    cache = make_cache(policy)
    feed(cache, start, [7])
    twin = copy.deepcopy(cache)
    assert twin.policy is policy
    assert twin.layers[0].scorer is policy.scorers[0]
    for used, text in ((cache, one), (twin, two)):
        whole = tuple(
            torch.cat([a, b], dim=2 if a.dim() == 4 else 1) for a, b in zip(start, text, strict=True)
        )
        straight = make_cache(policy)
        expected = feed(straight, whole, [7])
        parts = []
        for i in range(text[0].shape[2]):
            part = tuple(x[:, :, i : i + 1] if x.dim() == 4 else x[:, i : i + 1] for x in text)
            used.begin(1, 1, policy=policy)
            parts.append(used.attend(0, *part, 0.5))
        torch.testing.assert_close(torch.cat(parts, 2), expected[:, :, 20:], atol=1e-12, rtol=0)
        assert torch.equal(used.eviction_times(0), straight.eviction_times(0))


def test_another_dtype_after_reset() -> None:
    policy = make_policy("streaming_llm")
    cache = make_cache(policy)
    feed(cache, random_text(9), [4])
    cache.reset()
    half = tuple(x.bfloat16() for x in random_text(9))
    assert feed(cache, half, [4]).dtype == torch.bfloat16
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert cache.layers[0].score.dtype == torch.float32


def test_the_record_grows_with_the_text() -> None:
    """Past every size the record starts with, by chunks that end anywhere."""
    policy, text = make_policy("random", Budget(2, 3, 6)), random_text(700, heads=2, group=1)
    runs = []
    for sizes in ([9], [64], [300, 5]):
        cache = make_cache(policy)
        feed(cache, text, sizes)
        runs.append(cache.eviction_times(0))
    assert all(torch.equal(times, runs[0]) for times in runs)
    assert int((runs[0] != NEVER).sum()) == 2 * (700 - 11)


def test_no_record_no_growth() -> None:
    cache = make_cache(make_policy("mlp"), record=False)
    feed(cache, random_text(40), [1])
    assert cache.layers[0]._log is None
    with pytest.raises(ValueError, match="record=True"):
        cache.eviction_times(0)
