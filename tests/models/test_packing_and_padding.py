"""Packed documents do not see each other, bit for bit; padding on either side changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpop_lightning import Budget, retrofit
from kvpop_lightning.models import LayerObservation, dense, observe, tiny_model

BUDGET = Budget(1, 6, 5)
SCORERS = ("mlp", "mlstm", "random")
KINDS = [("llama", "mlp"), ("llama", "random"), ("llama", "mlstm"), ("qwen3", "mlstm"), ("mistral", "mlstm")]


def model_of(family: str = "llama", scorer: str = "mlstm", **kwargs: Any) -> Any:
    return retrofit(
        tiny_model(family, **kwargs), BUDGET, scorer=scorer, memory_dim=4, value_dim=4, inputs="kv_hidden"
    )


def packed(lengths: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """One row of documents: input ids [1, T], position ids [1, T] that restart."""
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randint(3, 272, (1, sum(lengths)), generator=g),
        torch.cat([torch.arange(n) for n in lengths])[None],
    )


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_changing_one_document_moves_no_other_bit(scorer: str, mode: str) -> None:
    """Forward, and the gradient of document B's loss with respect to every input embedding."""
    model = model_of(scorer=scorer)
    x, position_ids = packed((150, 1, 170, 20))
    results = []
    for change in (0, 1):
        tokens = x.clone()
        if change:  # everything but document 2
            tokens[:, :151] = tokens[:, :151].flip(1)
            tokens[:, 321:] = tokens[:, 321:].flip(1)
        embeddings = model.get_input_embeddings()(tokens).detach().requires_grad_()
        runs = {"inputs_embeds": embeddings, "position_ids": position_ids, "use_cache": False}
        if mode == "dense":
            with dense(model):
                out = model(**runs).logits
        else:
            out = model(**runs).logits
        out[:, 151:321].square().sum().backward()
        assert (embeddings.grad[:, :151] == 0).all()
        assert (embeddings.grad[:, 321:] == 0).all()
        results.append((out.detach(), embeddings.grad[:, 151:321]))
    assert torch.equal(results[0][0][:, 151:321], results[1][0][:, 151:321])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0][:, :151], results[1][0][:, :151])


@pytest.mark.parametrize(("family", "scorer"), KINDS)
def test_packed_equals_alone(family: str, scorer: str) -> None:
    model = model_of(family, scorer)
    lengths = (40, 1, 23, 64)
    x, position_ids = packed(lengths)
    together = model(x, position_ids=position_ids, use_cache=False).logits
    start = 0
    for n in lengths:
        alone = model(x[:, start : start + n], use_cache=False).logits
        torch.testing.assert_close(together[:, start : start + n], alone, atol=3e-5, rtol=0)
        start += n


def test_document_ids_may_be_given_instead() -> None:
    model = model_of()
    x, position_ids = packed((20, 30))
    document_ids = (torch.arange(50) >= 20).long()[None]
    expected = model(x, position_ids=position_ids, use_cache=False).logits
    assert torch.equal(model(x, document_ids=document_ids, use_cache=False).logits, expected)


@pytest.mark.parametrize(("family", "scorer"), KINDS)
@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("positions", ["given", "derived"])
def test_padding_equals_no_padding(family: str, scorer: str, side: str, positions: str) -> None:
    model = model_of(family, scorer)
    x, _ = packed((50,))
    keep = {"left": list(range(9, 59)), "right": list(range(50)), "middle": [*range(20), *range(29, 59)]}[
        side
    ]
    row = torch.zeros(2, 59, dtype=torch.int64)
    row[0, keep] = x[0]
    row[1] = torch.arange(3, 62)  # a full row beside it
    mask = torch.ones(2, 59, dtype=torch.int64)
    mask[0] = 0
    mask[0, keep] = 1
    kwargs: dict[str, Any] = {"attention_mask": mask, "use_cache": False}
    if positions == "given":
        kwargs["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    out = model(row, **kwargs).logits
    alone = model(x, use_cache=False).logits
    torch.testing.assert_close(out[0, keep], alone[0], atol=3e-5, rtol=0)
    torch.testing.assert_close(out[1], model(row[1:], use_cache=False).logits[0], atol=3e-5, rtol=0)
    row[0][mask[0] == 0] = 77  # what stands in the padding must not matter, bit for bit
    assert torch.equal(model(row, **kwargs).logits[0, keep], out[0, keep])
    with dense(model):
        torch.testing.assert_close(
            model(row, **kwargs).logits[0, keep], model(x, use_cache=False).logits[0], atol=3e-5, rtol=0
        )


def test_padding_gives_no_gradient_and_no_nan() -> None:
    model = model_of()
    x, _ = packed((30,))
    mask = torch.ones_like(x)
    mask[:, :7] = 0
    embeddings = model.get_input_embeddings()(x).detach().requires_grad_()
    out = model(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).logits
    assert out.isfinite().all()
    out[:, 7:].square().sum().backward()
    assert (embeddings.grad[:, :7] == 0).all()
    assert embeddings.grad.isfinite().all()


def test_observation_names_documents() -> None:
    model = model_of()
    x, position_ids = packed((10, 8))
    mask = torch.ones_like(x)
    mask[:, -3:] = 0
    seen: list[LayerObservation] = []
    with observe(model, seen.append):
        model(x, position_ids=position_ids, attention_mask=mask, use_cache=False)
    assert seen[0].document_ids.tolist() == [[0] * 10 + [1] * 5 + [-1] * 3]
    assert seen[0].position.tolist() == [[*range(10), *range(5), 0, 0, 0]]
    assert (seen[0].lse[..., -3:] == float("-inf")).all()
