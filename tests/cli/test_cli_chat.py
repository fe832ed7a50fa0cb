"""`kvpop chat`: turns follow one another in one cache; commands, Ctrl-C, and the end of the input."""

from __future__ import annotations

import io
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from kvpop_lightning import BoundedCache
from kvpop_lightning.cli import main
from kvpop_lightning.commands import chat as chat_module
from kvpop_lightning.commands.chat import Conversation
from kvpop_lightning.commands.generate import with_cache_policy
from kvpop_lightning.commands.generation import encode, encode_next, make_engine
from kvpop_lightning.config import Config, compose
from kvpop_lightning.errors import UserError
from kvpop_lightning.generation.runners import read_text
from kvpop_lightning.models import load_model

TINY = ["model=tiny_llama", "policy=kvpop_mlstm", "policy.equal_bytes=false", "max_new_tokens=9"]
TINY += ["policy.budget.sink=2", "policy.budget.window=6", "policy.budget.topk=8"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def conversation(*words: str) -> tuple[Conversation, Config]:
    config = compose([*TINY, *words], command="chat")
    model, tokenizer = load_model(config.model)
    model = with_cache_policy(model, config)
    return Conversation(make_engine(model, tokenizer, config, slots=1), config), config


def test_a_turn_goes_on_in_the_cache_of_those_before() -> None:
    talk, config = conversation()
    for message in ("hello", "and now?"):
        list(talk.answer(message))
    second = talk._last
    assert second is not None
    # By hand: the first turn, the tokens that were generated, the template's glue, greedily.
    model, tokenizer = talk.engine.model, talk.engine.tokenizer
    cache, text = BoundedCache(model, record=False), encode(tokenizer, "hello", config.generate)
    logits = read_text(model, cache, text, 256)
    for turn in range(2):
        answer: list[int] = []
        while len(answer) < 9 and int(logits.argmax()) not in talk.engine.end_tokens:
            answer.append(int(logits.argmax()))
            logits = read_text(model, cache, answer[-1:], 1)
        if turn == 0:
            logits = read_text(model, cache, encode_next(tokenizer, "and now?", config.generate), 256)
    assert second.tokens == answer
    assert second.prompt_tokens > len(text) + 9
    assert "16 keys held" in talk.line()
    talk.reset()
    list(talk.answer("hello"))
    assert talk._last is not None
    assert talk._last.prompt_tokens == len(text)


def test_the_template_ends_the_answer_and_begins_the_next() -> None:
    talk, config = conversation()
    tokenizer = talk.engine.tokenizer
    glue = tokenizer.decode(encode_next(tokenizer, "and now?", config.generate))
    assert glue == "<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"
    plain = replace(config.generate, chat_template=False)
    assert tokenizer.decode(encode_next(tokenizer, "and now?", plain)) == "\n\nand now?"


def test_a_stopped_answer_stays_and_the_conversation_goes_on() -> None:
    talk, _ = conversation("max_new_tokens=200", "ignore_eos=true")
    for number, _ in enumerate(talk.answer("hello"), 1):
        if number == 3:
            talk.stop()
    assert talk._last is not None
    assert (talk._last.finish, len(talk._last.tokens)) == ("cancelled", 3)
    before = talk._last.position
    for _ in talk.answer("again"):
        talk.stop()
    assert talk._last.prompt_tokens > before


def test_positions_that_are_used_up() -> None:
    talk, _ = conversation("max_new_tokens=5000", "ignore_eos=true")
    talk.engine.positions = 60
    list(talk.answer("hello"))
    assert "positions are used up" in talk.line()
    with pytest.raises(UserError, match="/reset"):
        list(talk.answer("again"))
    talk.reset()
    list(talk.answer("hello"))


def talked(lines: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str):
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    status = main(["chat", *TINY, *words])
    return status, capsys.readouterr()


def test_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, (out, err) = talked("hello\n/reset\nhello\n/what\n\n/quit\nnever read\n", capsys, monkeypatch)
    assert status == 0
    half = len(out) // 2  # the answer may have lines of its own
    assert half > 5
    assert out[:half] == out[half:]
    assert "forgotten" in err
    assert "unknown command /what" in err
    assert err.count("keys held per head") == 2
    assert talked("hello", capsys, monkeypatch)[0] == 0  # the input's end
    assert talked("", capsys, monkeypatch, "samples=2")[0] == 2
    assert talked("", capsys, monkeypatch, "prompt=hello")[0] == 2


def test_ctrl_c_stops_the_answer_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Conversation.answer
    before = signal.getsignal(signal.SIGINT)

    def pressed(self: Conversation, message: str):
        for number, piece in enumerate(given(self, message)):
            if message == "first" and number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield piece

    monkeypatch.setattr(chat_module.Conversation, "answer", pressed)
    words = ("max_new_tokens=50", "ignore_eos=true")
    status, (_, err) = talked("first\nsecond\n", capsys, monkeypatch, *words)
    assert status == 0
    lines = [line for line in err.splitlines() if "keys held" in line]
    assert ["stopped" in line for line in lines] == [True, False]
    assert signal.getsignal(signal.SIGINT) is before
