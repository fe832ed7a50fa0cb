"""Saving and loading: the policy always, the base only when it must."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvpop_lightning
from kvpop_lightning import Budget, retrofit
from kvpop_lightning.config.schema import ModelConfig
from kvpop_lightning.errors import UserError
from kvpop_lightning.models import load_model, persist, tiny_model
from kvpop_lightning.models.fingerprint import base_fingerprint

BUDGET = Budget(1, 6, 9)
X = torch.arange(3, 43)[None]


def logits(model: Any) -> Tensor:
    return model(X, use_cache=False).logits.detach()


def trained(model: Any, **kwargs: Any) -> Any:
    """Retrofitted, with scorers that are not fresh ones."""
    retrofit(model, BUDGET, **kwargs)
    with torch.no_grad():
        for p in model.kvpop.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.fixture
def named(tmp_path: Path) -> Callable[..., Any]:
    """A base that has a name: saved to a folder and loaded from there."""

    def make(**kwargs: Any) -> Any:
        tiny_model(**kwargs).save_pretrained(tmp_path / "base")
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base")

    return make


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_unchanged_base_is_stored_by_name(named: Any, tmp_path: Path, tied: bool, family: str) -> None:
    model = trained(
        named(family=family, tied=tied),
        scorer="mlstm",
        memory_dim=4,
        value_dim=4,
        decay=[0.5, 0.9],
        match_bytes=True,
    )
    model.save_pretrained(tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["kvpop.json", "kvpop.safetensors"]
    again = kvpop_lightning.load(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    assert again.kvpop.to_dict() == model.kvpop.to_dict()
    assert again.kvpop.budget == model.kvpop.budget != BUDGET
    assert not again.training
    # given as a model (another copy), and as a name
    assert torch.equal(
        logits(kvpop_lightning.load(tmp_path / "out", base=named(family=family, tied=tied))), logits(model)
    )
    assert torch.equal(
        logits(kvpop_lightning.load(tmp_path / "out", base=str(tmp_path / "base"))), logits(model)
    )


@pytest.mark.parametrize("tied", [True, False])
def test_changed_base_is_stored_with_its_weights(named: Any, tmp_path: Path, tied: bool) -> None:
    model = trained(named(tied=tied))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3  # one number
    model.save_pretrained(tmp_path / "out")
    again = kvpop_lightning.load(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(plain).__name__ == "LlamaForCausalLM"
    assert not [n for n in load_file(tmp_path / "out" / "model.safetensors") if "kvpop" in n]
    # Loaded from there and saved elsewhere: its only copy must travel along.
    again.save_pretrained(tmp_path / "third")
    (tmp_path / "out").rename(tmp_path / "gone")
    assert torch.equal(logits(kvpop_lightning.load(tmp_path / "third")), logits(model))


def test_base_trained_before_retrofit_is_not_lost(named: Any, tmp_path: Path) -> None:
    base = named()
    with torch.no_grad():
        for p in base.parameters():
            p.mul_(1.01)
    model = trained(base)
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(kvpop_lightning.load(tmp_path / "out")), logits(model))


def test_random_base_without_a_name_is_stored(tmp_path: Path) -> None:
    model = trained(tiny_model(seed=5))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(kvpop_lightning.load(tmp_path)), logits(model))


def test_loaded_by_source(tmp_path: Path) -> None:
    model, _ = load_model(ModelConfig(source="tiny-qwen3", device="cpu"))
    trained(model).save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(logits(kvpop_lightning.load(tmp_path)), logits(model))


def test_half_precision_round_trip(named: Any, tmp_path: Path) -> None:
    model = trained(named(dtype=torch.bfloat16))
    model.save_pretrained(tmp_path / "out")
    again = kvpop_lightning.load(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    assert {t.dtype for t in again.kvpop.parameters()} == {torch.float32}
    assert torch.equal(logits(again), logits(model))


def test_saving_twice_and_over_an_old_folder(named: Any, tmp_path: Path) -> None:
    model = trained(named())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    model.save_pretrained(tmp_path / "out")
    retrofit(model, BUDGET, policy="random").save_pretrained(tmp_path / "out")
    assert kvpop_lightning.load(tmp_path / "out").kvpop.name == "random"
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_fingerprint_sees_every_bit() -> None:
    model = tiny_model()
    before = base_fingerprint(model)
    retrofit(model, BUDGET)
    assert base_fingerprint(model) == before, "the policy is no part of the base"
    weight = model.model.layers[0].self_attn.k_proj.weight
    with torch.no_grad():
        weight[1, 2] = torch.nextafter(weight[1, 2], torch.tensor(9.0))
        changed = base_fingerprint(model)
        assert changed != before
        weight[[0, 1]] = weight[[1, 0]]  # the same numbers in another order
    assert base_fingerprint(model) not in (before, changed)
    assert base_fingerprint(tiny_model(vocab_size=271, hidden_size=42, head_dim=6)) != before  # odd sizes


def one_line(error: BaseException, *words: str) -> None:
    assert "\n" not in str(error)
    for word in words:
        assert word in str(error), str(error)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    description = json.loads((path / "kvpop.json").read_text())
    change(description)
    (path / "kvpop.json").write_text(json.dumps(description))


def test_loading_refusals(named: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = trained(named())
    model.save_pretrained(out)
    original = (out / "kvpop.json").read_text()

    def refused(*words: str, **kwargs: Any) -> None:
        with pytest.raises(UserError) as error:
            kvpop_lightning.load(kwargs.pop("path", out), **kwargs)
        one_line(error.value, *words)
        (out / "kvpop.json").write_text(original)

    refused("kvpop.json", path=tmp_path / "nothing")
    edit(out, lambda d: d.update(format=2))
    refused("format version 2", "reads 1")
    edit(out, lambda d: d["policy"].pop("budget"))
    refused("budget")
    edit(out, lambda d: d.pop("base"))
    refused("base")
    (out / "kvpop.json").write_text(original[:50])
    refused("cannot be read")
    edit(out, lambda d: [s.update(width=32) for s in d["policy"]["scorers"]])
    refused("shape", "kvpop.safetensors")
    edit(out, lambda d: [s.update(type="linear") for s in d["policy"]["scorers"]])
    refused("kvpop.safetensors", "does not fit")
    edit(out, lambda d: d["base"].update(name="/no/such/model"))
    refused("/no/such/model", "base=")
    edit(out, lambda d: d["base"].update(name=None))
    refused("base=")
    refused("not those", "strict=False", base=tiny_model(seed=9))
    assert kvpop_lightning.load(out, base=tiny_model(seed=9), strict=False).kvpop.name == "kvpop_mlp"
    refused("does not fit", "2 layers of 4 KV heads", base=tiny_model(kv_heads=4, seed=9), strict=False)
    whole = (out / "kvpop.safetensors").read_bytes()
    (out / "kvpop.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # one bit of a weight
    refused("its hash differs", "strict=False")
    assert kvpop_lightning.load(out, strict=False).kvpop.name == "kvpop_mlp"
    (out / "kvpop.safetensors").write_bytes(whole)
    weights = load_file(out / "kvpop.safetensors")
    save_file(dict(list(weights.items())[1:]), out / "kvpop.safetensors")
    refused("missing")
    (out / "kvpop.safetensors").write_bytes(b"short")
    refused("not a readable")
    (out / "kvpop.safetensors").unlink()
    refused("is missing")


def test_full_disk_keeps_the_old_files(named: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(named())
    out = tmp_path / "out"
    model.save_pretrained(out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    retrofit(model, BUDGET, policy="random")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(persist, "save_file", full)
    with pytest.raises(UserError) as error:
        model.save_pretrained(out)
    one_line(error.value, "no space left", str(out))
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "out"]
    with pytest.raises(UserError, match="is a file"):
        model.save_pretrained(out / "kvpop.json")
