"""`kvpop generate`: the same tokens as the library's generate, through a cache of the budget's size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpop_lightning.cli import main
from kvpop_lightning.commands.generate import with_cache_policy
from kvpop_lightning.commands.generation import Progress, _TextStream, encode, sample, stream
from kvpop_lightning.config import Config, compose
from kvpop_lightning.config.schema import GenerateConfig
from kvpop_lightning.models import load_model, retrofit
from kvpop_lightning.policy import Budget

TINY = ["model=tiny_llama", "policy.budget.sink=2", "policy.budget.window=6", "policy.budget.topk=8"]
PROMPT = "one two three four five six seven eight nine ten eleven twelve "


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configure(*words: str) -> Config:
    return compose([*TINY, f"prompt={PROMPT}", "max_new_tokens=20", *words], command="generate")


def generated(config: Config) -> tuple[str, list[Progress], Any, Any]:
    model, tokenizer = load_model(config.model)
    model = with_cache_policy(model, config)
    pieces = list(stream(model, tokenizer, PROMPT, config))
    return "".join(piece for piece, _ in pieces), [state for _, state in pieces], model, tokenizer


@pytest.mark.parametrize(
    "words", [["policy=random"], ["policy=kvpop_mlstm", "policy.equal_bytes=false"], ["policy=full"]]
)
def test_text_is_that_of_the_librarys_generate(words: list[str]) -> None:
    config = configure(*words)
    text, _, model, tokenizer = generated(config)
    ids = encode(tokenizer, PROMPT, config.generate)
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert text == tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
    assert text


def test_prompt_chunks_change_nothing() -> None:
    texts = {generated(configure("policy=random", f"chunk={chunk}"))[0] for chunk in (7, 1000)}
    assert len(texts) == 1


def test_figures_beside_the_text() -> None:
    config = configure("policy=random+decay", "chunk=10")
    _, states, model, tokenizer = generated(config)
    prompt_tokens = encode(tokenizer, PROMPT, config.generate).shape[1]
    assert [state.tokens_seen for state in states[: -(-prompt_tokens // 10)]][-1] == prompt_tokens
    assert max(state.keys_held for state in states) == 16
    assert len({state.bytes_held for state in states}) == 1  # allocated once
    last, shape = states[-1], model.config
    size = shape.head_dim
    per_token = shape.num_hidden_layers * shape.num_key_value_heads * 2 * size * 4
    assert last.full_bytes == per_token * last.tokens_seen
    assert last.bytes_held < last.full_bytes
    line = last.line()
    assert f"{last.tokens_seen} tokens seen" in line
    assert "16 keys held" in line


def test_full_holds_everything() -> None:
    _, states, _, _ = generated(configure("policy=full"))
    assert states[-1].keys_held == states[-1].tokens_seen
    assert states[-1].bytes_held == states[-1].full_bytes


def test_command_prints_text_and_a_last_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*TINY, f"prompt={PROMPT}", "max_new_tokens=5", "policy=kvpop_linear", "temperature=0.7"]
    assert main(["generate", *words]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    lines = err.splitlines()
    assert "kvpop_linear is not trained" in lines[0]
    assert "keys held per head" in lines[-1]
    assert not (tmp_path / "runs").exists()


def test_a_trained_policy_is_used(tmp_path: Path) -> None:
    config = configure("policy=kvpop_mlp", f"run_dir={tmp_path / 'run'}")
    model, _ = load_model(config.model)
    retrofit(model, Budget(2, 6, 8), policy="kvpop_mlp", width=4)
    model.save_pretrained(tmp_path / "run" / "policy" / "kvpop_mlp")
    saved = {name: value.clone() for name, value in model.kvpop.state_dict().items()}
    fresh, _ = load_model(config.model)
    loaded = with_cache_policy(fresh, config).kvpop.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_sampling() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, -5.0])
    generator = torch.Generator().manual_seed(0)
    settings = GenerateConfig()
    assert sample(logits, settings, generator) == 1
    drawn = {sample(logits, replace(settings, temperature=1.0), generator) for _ in range(200)}
    assert {1, 2} <= drawn
    assert {sample(logits, replace(settings, temperature=1.0, top_p=0.5), generator) for _ in range(50)} == {
        1
    }
    assert {sample(logits, replace(settings, temperature=9.0, top_p=0.7), generator) for _ in range(200)} == {
        0,
        1,
        2,
    }
    again = [
        sample(logits, replace(settings, temperature=1.0), torch.Generator().manual_seed(3)) for _ in range(2)
    ]
    assert again[0] == again[1]


class Bytes:
    """A tokenizer with one token per byte."""

    chat_template = "yes"

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    def __call__(self, text: str, **kwargs: Any) -> dict[str, torch.Tensor]:
        self.text, self.options = text, kwargs
        return {"input_ids": torch.tensor([list(text.encode())])}


def test_text_never_shows_half_a_character() -> None:
    text = "naïve → 日本 🙂 end"
    screen = _TextStream(Bytes())
    pieces = [screen.push(byte) for byte in text.encode()] + [screen.rest()]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)
    screen = _TextStream(Bytes())
    assert [screen.push(byte) for byte in "🙂".encode()[:2]] == ["", ""]
    assert "�" in screen.rest()  # cut off by max_new_tokens


def test_prompt_goes_through_the_chat_template() -> None:
    tokenizer = Bytes()
    encode(tokenizer, "hi", GenerateConfig(system="be short"))
    assert tokenizer.text == "<system>be short<user>hi"
    assert tokenizer.options["add_special_tokens"] is False
    encode(tokenizer, "hi", GenerateConfig(chat_template=False))
    assert tokenizer.text == "hi"
