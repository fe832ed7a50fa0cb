"""The backends of attention and target: chosen by key or argument, refused in one line, in no result."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpop_lightning import Budget, retrofit
from kvpop_lightning.attention import BACKENDS, sparse_attention, unavailable_backends
from kvpop_lightning.config.choices import CHOICES
from kvpop_lightning.config.compose import compose
from kvpop_lightning.config.policies import retrofit_options
from kvpop_lightning.config.schema import ModelConfig
from kvpop_lightning.errors import ConfigError, UserError
from kvpop_lightning.models import LayerObservation, attend, load_model, observe, tiny_model, unretrofit
from kvpop_lightning.models.backends import Backends, backends_of, check_backends
from kvpop_lightning.policy.target import TARGET_BACKENDS, unavailable_target_backends
from kvpop_lightning.training import features
from kvpop_lightning.training.runtime import settings_key

BUDGET = Budget(1, 4, 3)
CPU = torch.device("cpu")
no_triton_on_cpu = pytest.mark.skipif(
    "triton" not in unavailable_backends(CPU, torch.float32), reason="triton runs on the CPU here"
)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Backends that the layers asked for."""
    asked: list[str] = []
    real = attend.sparse_attention

    def spy(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        asked.append(kwargs["backend"])
        return real(*args, **kwargs)

    monkeypatch.setattr(attend, "sparse_attention", spy)
    return asked


def ids(length: int = 24) -> Tensor:
    return torch.randint(5, 100, (1, length), generator=torch.Generator().manual_seed(0))


def test_the_keys_take_what_the_functions_take() -> None:
    assert set(CHOICES["model.attention_backend"]) == set(BACKENDS)
    assert set(CHOICES["model.target_backend"]) == set(TARGET_BACKENDS)


@torch.no_grad()
def test_the_layers_use_what_was_asked_for_and_it_changes_nothing(used: list[str]) -> None:
    model = retrofit(tiny_model("llama"), BUDGET, attention_backend="reference")
    slow = model(ids(), use_cache=False).logits
    assert set(used) == {"reference"}
    used.clear()
    fast = retrofit(model, BUDGET, attention_backend="auto")(ids(), use_cache=False).logits
    assert set(used) == {"auto"}
    torch.testing.assert_close(fast, slow, atol=1e-4, rtol=0)


@torch.no_grad()
def test_the_choice_stays_with_the_model(used: list[str]) -> None:
    model, _ = load_model(ModelConfig(source="tiny-llama", device="cpu", attention_backend="reference"))
    for other in (retrofit(model, BUDGET), copy.deepcopy(model), retrofit(unretrofit(model), BUDGET)):
        used.clear()
        other(ids(), use_cache=False)
        assert set(used) == {"reference"}
    assert backends_of(retrofit(model, BUDGET, target_backend="chunked")) == Backends("reference", "chunked")


@no_triton_on_cpu
@pytest.mark.parametrize("key", ["attention_backend", "target_backend"])
def test_what_cannot_run_here_is_refused_by_key_with_the_choices(key: str) -> None:
    for make in (
        lambda: load_model(ModelConfig(source="tiny-llama", device="cpu", **{key: "triton"})),
        lambda: retrofit(tiny_model("llama"), BUDGET, **{key: "triton"}),
    ):
        with pytest.raises(
            UserError, match=rf"model\.{key}=triton: triton .*available here: auto, reference"
        ):
            make()
    with pytest.raises(
        UserError, match=rf"model\.{key}=tritn: no such backend; did you mean triton.*not avail"
    ):
        retrofit(tiny_model("llama"), BUDGET, **{key: "tritn"})
    with pytest.raises(ConfigError, match=rf"model\.{key}=tritn: no such choice"):
        compose([f"model.{key}=tritn"])


def test_a_refused_backend_leaves_the_model_as_it_was() -> None:
    model = retrofit(tiny_model("llama"), BUDGET, attention_backend="reference")
    policy = model.kvpop
    with pytest.raises(UserError, match="no such backend"):
        retrofit(model, BUDGET, target_backend="nothing")
    assert model.kvpop is policy
    assert backends_of(model) == Backends("reference", "auto")


def test_every_backend_is_either_available_or_refused_with_a_reason() -> None:
    for names, find in ((BACKENDS, unavailable_backends), (TARGET_BACKENDS, unavailable_target_backends)):
        missing = find(CPU, torch.float32)
        assert "auto" not in missing
        assert "reference" not in missing
        assert set(missing) < set(names)
        assert all(missing.values())
    check_backends(Backends("sdpa", "chunked"), CPU, torch.float64)


def test_no_key_of_a_result_knows_them(tmp_path: Path) -> None:
    """Checkpoints, saved policies and what they say of their base."""
    plain = compose(["experiment=smoke"])
    other = replace(
        plain, model=replace(plain.model, attention_backend="reference", target_backend="chunked")
    )
    assert settings_key(plain, "data", "base") == settings_key(other, "data", "base")
    files = []
    for name, config in (("plain", plain), ("other", other)):
        model, _ = load_model(replace(config.model, device="cpu"))
        options = retrofit_options(config)
        assert options["attention_backend"] == config.model.attention_backend
        retrofit(model, BUDGET, **options).save_pretrained(tmp_path / name)
        files.append((tmp_path / name / "kvpop.json").read_text())
    assert files[0] == files[1]
    assert "backend" not in files[0]


def test_the_target_is_computed_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = features.future_attention_target

    def spy(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        asked.append(kwargs["backend"])
        return real(*args, **kwargs)

    monkeypatch.setattr(features, "future_attention_target", spy)
    model = retrofit(tiny_model("llama"), BUDGET, target_backend="reference")
    tokens = ids()
    batch = {
        "input_ids": tokens,
        "position_ids": torch.arange(24)[None],
        "document_ids": torch.zeros_like(tokens),
    }
    request = features.FeatureRequest(window=BUDGET.window)
    exact = features.dense_features(model, batch, request)["target"]
    assert set(asked) == {"reference"}
    retrofit(model, BUDGET, target_backend="chunked")
    torch.testing.assert_close(features.dense_features(model, batch, request)["target"], exact)
    assert set(asked) == {"reference", "chunked"}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_an_attention_that_knows_its_normaliser_hands_it_to_observers() -> None:
    model = retrofit(tiny_model("llama"), BUDGET, attention_backend="flex")
    seen: list[LayerObservation] = []
    with observe(model, seen.append):
        model(ids(), use_cache=False)
    assert seen
    for layer in seen:
        assert layer.known_lse is not None
        torch.testing.assert_close(layer.lse, replace(layer, known_lse=None).lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_under_autocast_attention_reads_one_half_precision_dtype(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """RoPE leaves queries and keys in float32: the kernels for half precision would never run in training."""
    dtypes: list[torch.dtype] = []
    real = attend.sparse_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        dtypes.extend(x.dtype for x in (query, key, value))
        return real(query, key, value, *args, **kwargs)

    monkeypatch.setattr(attend, "sparse_attention", spy)
    model = retrofit(tiny_model(family), BUDGET)
    seen: list[LayerObservation] = []
    with torch.autocast("cpu", dtype=torch.bfloat16), observe(model, seen.append):
        lowered = model(ids(), use_cache=False).logits
    assert set(dtypes) == {torch.bfloat16}
    assert {layer.key.dtype for layer in seen} == {torch.bfloat16}
    assert all(layer.score is not None and layer.score.dtype == torch.float32 for layer in seen)
    lowered.float().square().mean().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if n.endswith("q_proj.weight"))
    with torch.no_grad():
        exact = model(ids(), use_cache=False).logits
    assert (lowered.float() - exact).abs().median() < 0.05
    doubled = sparse_attention(
        *(torch.randn(3, 1, 2, 9, 8).double()), torch.full((1, 2, 9), 99), budget=BUDGET
    )
    assert doubled[0].dtype == torch.float64
