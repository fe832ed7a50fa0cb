"""What the agreement on SmolLM2 rests on, on a tiny model: evictions read off the slots, checks that bite."""

from __future__ import annotations

import pytest
import torch
from agreement_cases import against_parallel, between, by_engine, by_generate, violations
from invariant_checks import Run, retrofitted, run_parallel

from kvpop_lightning.policy import NEVER


@pytest.fixture(scope="module", params=["mlp", "mlstm_0"])
def three(request: pytest.FixtureRequest):
    model = retrofitted("llama", request.param, dtype=torch.float32)
    ids = torch.randint(3, 200, (1, 60), generator=torch.Generator().manual_seed(2))
    return model, ids, run_parallel(model, ids, None), by_engine(model, ids, "plain"), by_generate(model, ids)


def test_the_engine_evicts_what_the_cache_notes(three) -> None:
    _, _, _, engine, library = three
    assert sum(int((one != NEVER).sum()) for one in library.evictions) > 100
    assert all(torch.equal(a, b) for a, b in zip(engine.evictions, library.evictions, strict=True))
    assert torch.equal(engine.logits, library.logits)
    assert violations("pair", between(engine, library)) == []


def test_wrong_evictions_and_wrong_logits_are_named(three) -> None:
    model, ids, parallel, engine, _ = three

    def named(run: Run) -> list[str]:
        return [line for line in violations("x", against_parallel(model, ids, run, parallel))
                if "only" not in line]  # fmt: skip

    assert named(engine) == []
    # One token kept for one query longer than it was.
    times = [one.clone() for one in engine.evictions]
    token = int((times[0][0, 0] < 40).nonzero()[0])
    times[0][0, 0, token] += 5
    assert any("off" in line or "query" in line for line in named(Run(engine.logits, times)))
    assert any("logits" in line for line in named(Run(engine.logits + 1e-3, engine.evictions)))
    moved = Run(engine.logits + 1e-3, engine.evictions)
    assert violations("pair", between(moved, engine)) != []
