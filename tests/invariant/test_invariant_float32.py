"""(b) and (c) of the invariant in float32: replay within 1e-4, free running differs only in near-ties."""

from __future__ import annotations

import pytest
import torch
from invariant_checks import (
    Run,
    check_free_running,
    check_replay,
    padded_batch,
    retrofitted,
    run_cache,
    run_parallel,
)

from kvpop_lightning import BoundedCache
from kvpop_lightning.policy import NEVER

CASES = [("llama", 4, "mlp_kv_hidden"), ("qwen3", 3, "mlstm_window"), ("mistral", 1, "random_decay")]


@pytest.mark.parametrize(("family", "group", "name"), CASES)
def test_replay_and_free_running(family: str, group: int, name: str) -> None:
    model = retrofitted(family, name, group=group, dtype=torch.float32)
    ids, mask = padded_batch(66, seed=group)
    parallel = run_parallel(model, ids, mask)
    for size in (1, 7, 64):
        cached = run_cache(model, ids, mask, size)
        check_replay(model, ids, mask, cached, 1e-4)
        ties = check_free_running(parallel, cached, 1e-4)
        assert ties.decisions > 100
        assert ties.near_ties <= ties.decisions // 50
        print(f"{family} {name} chunk {size}: {ties}")


def test_free_running_check_can_fail() -> None:
    """An eviction that is no near-tie is refused; one that is a near-tie is counted."""
    model = retrofitted("llama", "mlp", dtype=torch.float32)
    ids = torch.randint(3, 272, (1, 60), generator=torch.Generator().manual_seed(2))
    parallel, cached = run_parallel(model, ids, None), run_cache(model, ids, None, 7)
    assert check_free_running(parallel, cached, 1e-4).near_ties == 0
    evictions = [times.clone() for times in cached.evictions]
    times = evictions[0][0, 0]
    first, other = (times == 20).nonzero()[0, 0], (times == 31).nonzero()[0, 0]
    times[first], times[other] = 31, 20
    swapped = Run(cached.logits, evictions)
    with pytest.raises(
        AssertionError, match=r"layer 0, head 0, query 20: evicted token \d+, \d\.\d+e.*nats off"
    ):
        check_free_running(parallel, swapped, 1e-4)
    assert parallel.priorities is not None
    priority = parallel.priorities[0][0, 0]
    priority[first] = priority[other] + 5e-4
    assert check_free_running(parallel, swapped, 1e-4).near_ties == 1


def test_replay_check_can_fail() -> None:
    model = retrofitted("llama", "mlp", dtype=torch.float32)
    ids = torch.randint(3, 272, (1, 60), generator=torch.Generator().manual_seed(2))
    cached = run_cache(model, ids, None, 7)
    check_replay(model, ids, None, cached, 1e-4)
    held_on = [torch.where(times < 40, NEVER, times) for times in cached.evictions]
    with pytest.raises(AssertionError, match="replayed logits differ"):
        check_replay(model, ids, None, Run(cached.logits, held_on), 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_and_keeps_scores_in_float32(dtype: torch.dtype) -> None:
    model = retrofitted("llama", "mlstm_window", dtype=dtype)
    ids, mask = padded_batch(40)
    cached = run_cache(model, ids, mask, 7)
    assert cached.logits.dtype == dtype
    assert cached.logits[mask != 0].isfinite().all()
    with torch.no_grad():
        cache = BoundedCache(model)
        model(ids, attention_mask=mask, past_key_values=cache)
    layer = cache.layers[0]
    assert layer.keys.dtype == dtype
    assert layer.score.dtype == layer.waiting_score.dtype == torch.float32
    assert all(tensor.dtype == torch.float32 for tensor in layer.state.values())
    assert cache.bytes_held() == 4 * model.kvpop.bytes_per_sequence(element_bytes=2)
