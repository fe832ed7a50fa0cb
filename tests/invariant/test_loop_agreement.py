"""The cache against the hand-written loop on random queries, keys and values: outputs and eviction times."""

from __future__ import annotations

import pytest
import torch
from layer_harness import feed, loop, make_cache, make_policy, random_text

from kvpop_lightning.policy import NEVER, Budget

SCORERS = {
    "linear": {},
    "mlp": {},
    "mlp_hidden": {"scorer": "mlp", "inputs": "hidden"},
    "mlp_kv_hidden": {"scorer": "mlp", "inputs": "kv_hidden"},
    "mlstm_window": {"scorer": "mlstm", "delay": None},
    "mlstm_0": {"scorer": "mlstm", "delay": 0},
    "mlstm_2": {"scorer": "mlstm", "delay": 2},
    "mlstm_kv_hidden": {"scorer": "mlstm", "delay": None, "inputs": "kv_hidden"},
    "mlstm_hidden_1": {"scorer": "mlstm", "delay": 1, "inputs": "hidden"},
    "streaming_llm": {},
    "random": {},
    "key_norm": {},
}
CHUNKINGS = ([1], [7], [64], [3, 1, 1, 11, 1, 2])


def policy_of(name: str, budget: Budget | None = None, **more: object):
    options = dict(SCORERS[name])
    kind = options.pop("scorer", name.split("_")[0] if name.startswith("mlstm") else name)
    return make_policy(kind, budget, **options, **more)


def check(policy, text, chunkings=CHUNKINGS, *, chunk=128, mask=None) -> None:
    """Raises AssertionError where the cache and the loop differ."""
    runs = []
    for sizes in chunkings:
        cache = make_cache(policy, chunk=chunk)
        runs.append((feed(cache, text, sizes, mask), cache.eviction_times(0)))
    for row in range(text[0].shape[0]):
        columns = torch.arange(text[0].shape[2]) if mask is None else mask[row].nonzero()[:, 0]
        row_text = tuple(x[:, :, columns] if x.dim() == 4 else x[:, columns] for x in text)
        expected, evictions = loop(policy, row_text, row)
        for out, times in runs:
            compare(out[row], times[row], expected, evictions, columns)


def compare(out, times, expected, evictions, columns) -> None:
    """One row: out [Hq, T, D] by column, times [Hkv, N] by token."""
    length = len(columns)
    assert torch.equal(times[:, :length], evictions)
    assert (times[:, length:] == NEVER).all()
    torch.testing.assert_close(out[:, columns], expected, atol=1e-10, rtol=0)
    padding = torch.ones(out.shape[1], dtype=torch.bool)
    padding[columns] = False
    assert (out[:, padding] == 0).all()


@pytest.mark.parametrize("name", SCORERS)
def test_cache_equals_loop(name: str) -> None:
    check(policy_of(name), random_text(41))


@pytest.mark.parametrize(
    "budget", [Budget(0, 1, 1), Budget(3, 1, 2), Budget(1, 9, 3), Budget(4, 2, 9), Budget(0, 5, 4)]
)
@pytest.mark.parametrize("name", ["mlp", "mlstm_window", "streaming_llm"])
@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_awkward_budgets(name: str, budget: Budget, decay: float) -> None:
    policy = policy_of(name, budget, decay=decay)
    check(policy, random_text(29, seed=1), ([1], [5], [2, 13, 1]))


@pytest.mark.parametrize("length", [1, 2, 8, 11])
def test_budget_larger_than_the_text(length: int) -> None:
    for name in ("mlp", "mlstm_window"):
        policy = policy_of(name)
        check(policy, random_text(length), ([1], [3], [64]))


@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
def test_inner_split_changes_nothing(chunk: int) -> None:
    for name in ("mlp", "mlstm_window"):
        check(policy_of(name), random_text(33), ([33],), chunk=chunk)


def masks(length: int) -> torch.Tensor:
    """Rows padded left, right, on both sides and inside, and one row without padding."""
    mask = torch.ones(5, length, dtype=torch.bool)
    mask[1, :9] = False
    mask[2, -13:] = False
    mask[3, :3] = mask[3, 20:22] = mask[3, -2:] = False
    mask[4, : length - 4] = False
    return mask


@pytest.mark.parametrize("name", ["mlp_kv_hidden", "mlstm_window", "mlstm_0", "mlstm_kv_hidden", "random"])
def test_padding_anywhere(name: str) -> None:
    check(policy_of(name), random_text(36, batch=5), mask=masks(36))


def test_ties_go_to_the_newer_and_evict_the_oldest() -> None:
    """Constant scores without decay: exactly a sliding window of w + k, whichever way the tokens come."""
    policy = make_policy("streaming_llm", Budget(2, 4, 5), decay=1.0)
    for sizes in CHUNKINGS:
        cache = make_cache(policy)
        feed(cache, random_text(40), sizes)
        times = cache.eviction_times(0)[0, 0]
        assert (times[:2] == NEVER).all()
        assert times[2:31].tolist() == [t + 9 for t in range(2, 31)]
        assert (times[31:] == NEVER).all()
