"""`kvpop generate`: the same tokens as the library's generate, through a cache of the budget's size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpop_lightning.cli import main
from kvpop_lightning.commands.generate import generate, with_cache_policy
from kvpop_lightning.commands.generation import Progress, encode
from kvpop_lightning.config import Config, compose
from kvpop_lightning.config.schema import GenerateConfig
from kvpop_lightning.generation.text import TextStream
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
    pieces: list[tuple[str, Progress]] = []
    generate(
        model, tokenizer, PROMPT, config, lambda sample, text, state, ended: pieces.append((text, state))
    )
    return "".join(piece for piece, _ in pieces), [state for _, state in pieces], model, tokenizer


@pytest.mark.parametrize(
    "words", [["policy=random"], ["policy=kvpop_mlstm", "policy.equal_bytes=false"], ["policy=full"]]
)
def test_text_is_that_of_the_librarys_generate(words: list[str]) -> None:
    config = configure(*words)
    text, _, model, tokenizer = generated(config)
    ids = torch.tensor([encode(tokenizer, PROMPT, config.generate)])
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert text == tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
    assert text


def test_prompt_chunks_change_nothing() -> None:
    texts = {generated(configure("policy=random", f"chunk={chunk}"))[0] for chunk in (7, 1000)}
    assert len(texts) == 1


def test_figures_beside_the_text() -> None:
    config = configure("policy=random+decay", "chunk=10")
    _, states, model, tokenizer = generated(config)
    prompt_tokens = len(encode(tokenizer, PROMPT, config.generate))
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


@pytest.mark.parametrize("policy", ["random", "full"])
def test_samples_and_stop_strings(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    words = [*TINY, f"policy={policy}", f"prompt={PROMPT}", "max_new_tokens=12", "ignore_eos=true"]
    words += ["temperature=1.5", "samples=3", "seed=4"]
    texts = []
    for slots in ("slots=1", "slots=3"):
        assert main(["generate", *words, slots]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    parts = [part.partition("\n")[2] for part in texts[0].split("--- sample ")[1:]]
    assert len(set(parts)) == 3
    alone = [word for word in words if not word.startswith("samples")]
    assert main(["generate", *alone]) == 0
    whole = capsys.readouterr().out
    assert whole == parts[0]
    stop = whole.strip()[3]
    assert main(["generate", *alone, f"stop=[{json.dumps(stop)}]"]) == 0
    assert capsys.readouterr().out == whole[: whole.index(stop)] + "\n"
    assert main(["generate", *alone, "seed=5"]) == 0
    assert capsys.readouterr().out != whole


@pytest.mark.parametrize("word", ["top_k=-1", "min_p=1.5", "samples=0", "backend=fast", "top_p=0"])
def test_impossible_settings_are_one_line(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *TINY, f"prompt={PROMPT}", word]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: generate.{word}")


def test_a_prompt_past_the_positions_is_refused_or_read_on_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*TINY, "policy=random", "prompt=" + "word " * 900, "max_new_tokens=2"]
    assert main(["generate", *words]) == 2
    assert "4096 positions" in capsys.readouterr().err
    assert main(["generate", *words, "beyond_positions=true"]) == 0
    assert "16 keys held" in capsys.readouterr().err


class Bytes:
    """A tokenizer with one token per byte."""

    chat_template = "yes"

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        self.text, self.options = text, kwargs
        return {"input_ids": list(text.encode())}


def test_text_never_shows_half_a_character() -> None:
    text = "naïve → 日本 🙂 end"
    screen = TextStream(Bytes())
    pieces = [screen.push(byte) for byte in text.encode()] + [screen.rest()]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)
    screen = TextStream(Bytes())
    assert [screen.push(byte) for byte in "🙂".encode()[:2]] == ["", ""]
    assert "�" in screen.rest()  # cut off by max_new_tokens


def test_prompt_goes_through_the_chat_template() -> None:
    tokenizer = Bytes()
    encode(tokenizer, "hi", GenerateConfig(system="be short"))
    assert tokenizer.text == "<system>be short<user>hi"
    assert tokenizer.options["add_special_tokens"] is False
    encode(tokenizer, "hi", GenerateConfig(chat_template=False))
    assert tokenizer.text == "hi"
