"""The invariant on a GPU: float64 decisions, float32 replay, and memory that does not grow with the text."""

from __future__ import annotations

import pytest
import torch
from invariant_checks import SCORERS, check_equal, check_replay, padded_batch, retrofitted, run_cache

from kvpop_lightning import BoundedCache

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("name", SCORERS)
def test_float64(name: str) -> None:
    ids, mask = padded_batch(71)
    check_equal(retrofitted("qwen3", name).cuda(), ids, mask, tolerance=1e-8)


@pytest.mark.parametrize("name", ["mlp", "mlstm_window"])
def test_float32_replay(name: str) -> None:
    ids, mask = padded_batch(71)
    model = retrofitted("llama", name, dtype=torch.float32).cuda()
    for size in (1, 7, 64):
        check_replay(model, ids, mask, run_cache(model, ids, mask, size), 1e-4)


@torch.no_grad()
def test_memory_does_not_grow_with_the_text() -> None:
    model = retrofitted("llama", "mlstm_window", dtype=torch.bfloat16).cuda()
    cache = BoundedCache(model, record=False)
    peaks = []
    for tokens in (512, 4096):
        cache.reset()
        for start in range(0, tokens, 128):
            if start == 256:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            model(torch.full((2, 128), 7, device="cuda"), past_key_values=cache, use_cache=True)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] == peaks[0]
