"""What a retrofitted model refuses, each in one clear line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, GPT2Config, GPT2LMHeadModel

from kvpop_lightning import BoundedCache, Budget, retrofit
from kvpop_lightning.errors import UserError
from kvpop_lightning.models import dense, observe, replay, tiny_model, unretrofit

BUDGET = Budget(1, 6, 5)
X = torch.arange(3, 33)[None]
MASK = torch.ones_like(X)


@pytest.fixture(scope="module")
def model() -> Any:
    return retrofit(tiny_model(), BUDGET)


def refuse(call: Callable[[], Any], *words: str, error: type[ValueError] = ValueError) -> None:
    with pytest.raises(error) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line, line


def in_mode(context: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        with context:
            call()

    return run


def test_masks(model: Any) -> None:
    four = torch.ones(1, 1, 30, 30, dtype=torch.bool)
    refuse(lambda: model(X, attention_mask=four, use_cache=False), "[1, 1, 30, 30]", "padding mask")
    refuse(lambda: model(X, attention_mask=four, past_key_values=BoundedCache(model)), "padding mask")
    refuse(lambda: model(X, attention_mask={"full_attention": MASK}, use_cache=False), "padding mask")
    refuse(lambda: model(X, attention_mask=MASK[:, :29], use_cache=False), "[1, 30]", "[1, 29]")
    refuse(lambda: model(X, attention_mask=torch.ones(1, 31), use_cache=False), "[1, 30]", "[1, 31]")
    refuse(
        lambda: model(X, attention_mask=MASK[:, :29], past_key_values=BoundedCache(model)), "attention_mask"
    )
    refuse(lambda: model.generate(X, attention_mask=MASK[:, :29], max_new_tokens=2), "attention_mask")
    refuse(in_mode(dense(model), lambda: model(X, attention_mask=four, use_cache=False)), "padding mask")


def test_positions_and_documents(model: Any) -> None:
    refuse(
        lambda: model(X, position_ids=torch.arange(29)[None], use_cache=False), "position_ids must be [1, 30]"
    )
    falling = torch.tensor([[1] * 10 + [0] * 20])
    refuse(lambda: model(X, document_ids=falling, use_cache=False), "document_ids")
    packed = torch.cat([torch.arange(13), torch.arange(17)])[None]
    refuse(
        lambda: model(X, position_ids=packed, past_key_values=BoundedCache(model)),
        "position_ids",
        "one document",
    )
    refuse(lambda: model(X, position_ids=packed, use_cache=True), "one document")
    refuse(lambda: model(X, document_ids=falling, past_key_values=BoundedCache(model)), "document_ids")


def test_caches(model: Any) -> None:
    refuse(lambda: model(X, past_key_values=DynamicCache()), "DynamicCache", "BoundedCache(model)")
    refuse(lambda: model.generate(X, past_key_values=DynamicCache(), max_new_tokens=2), "DynamicCache")
    refuse(lambda: model.generate(X, cache_implementation="static", max_new_tokens=2), "cache_implementation")
    other = retrofit(tiny_model(), BUDGET)
    refuse(lambda: model(X, past_key_values=BoundedCache(other)), "another model or policy")
    old = BoundedCache(other)
    retrofit(other, BUDGET)
    refuse(lambda: other(X, past_key_values=old), "another model or policy")
    refuse(in_mode(dense(model), lambda: model(X, past_key_values=BoundedCache(model))), "dense")
    refuse(lambda: BoundedCache(unretrofit(other)), "retrofit")


def test_another_attention_set_back() -> None:
    model = retrofit(tiny_model(), BUDGET)
    expected = model(X, use_cache=False).logits
    model.set_attn_implementation("sdpa")
    refuse(lambda: model(X, use_cache=False), "'sdpa'", 'set_attn_implementation("kvpop")')
    refuse(lambda: model(X, past_key_values=BoundedCache(model)), "'sdpa'")
    model.set_attn_implementation("kvpop")
    assert torch.equal(model(X, use_cache=False).logits, expected)


def test_attention_without_retrofit() -> None:
    model = tiny_model()
    model.set_attn_implementation("kvpop")
    refuse(lambda: model(X, use_cache=False), "retrofit")


def test_modes(model: Any) -> None:
    plain = tiny_model()
    refuse(in_mode(dense(plain), lambda: None), "retrofit")
    refuse(in_mode(observe(plain, print), lambda: None), "retrofit")
    times = [torch.arange(30).expand(1, 2, 30) + 6] * 2
    refuse(in_mode(replay(model, times[:1]), lambda: None), "one per layer", "got 1")
    refuse(in_mode(replay(model, [t[:, :1] for t in times]), lambda: None), "[B, 2, T]")
    refuse(in_mode(replay(model, [t[..., :29] for t in times]), lambda: model(X, use_cache=False)), "layer 0")
    refuse(
        in_mode(replay(model, times), lambda: model(X, past_key_values=BoundedCache(model))),
        "use_cache=False",
    )
    refuse(in_mode(observe(model, print), lambda: model(X, use_cache=True)), "use_cache=False")


def test_models_that_cannot_be_retrofitted() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2))
    refuse(lambda: retrofit(bloom, BUDGET), "BloomForCausalLM", "attention interface", error=UserError)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2))
    refuse(lambda: retrofit(gpt2, BUDGET), "GPT2LMHeadModel", "Llama", error=UserError)
    refuse(lambda: retrofit(nn.Linear(2, 2), BUDGET), "PreTrainedModel", "Linear", error=UserError)
    sliding = tiny_model("mistral", sliding_window=8)
    refuse(lambda: retrofit(sliding, BUDGET), "sliding", "8", "sliding_window=None", error=UserError)
    mixed = tiny_model("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    refuse(lambda: retrofit(mixed, BUDGET), "sliding_attention", error=UserError)
    for untouched in (bloom, gpt2, sliding, mixed):
        assert not hasattr(untouched, "kvpop")


def test_settings() -> None:
    model = tiny_model()
    refuse(lambda: retrofit(model), "budget=Budget(sink, window, topk)")
    refuse(lambda: retrofit(model, BUDGET, policy="full"), "full")
    refuse(lambda: retrofit(model, BUDGET, scorer="mlpp"), "mlpp")
    refuse(lambda: retrofit(model, BUDGET, scorer="mlstm", delay=7), "delay 7", "window 6")
    policy = retrofit(tiny_model(kv_heads=1), BUDGET).kvpop
    refuse(lambda: retrofit(model, policy=policy), "2 layers of 1 KV heads")
    dropout = retrofit(tiny_model(attention_dropout=0.1), BUDGET).train()
    refuse(lambda: dropout(X, use_cache=False), "dropout")
