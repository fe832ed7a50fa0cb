"""Faults of requests and of memory: each is one clear line, and what runs beside it goes on unchanged."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpop_lightning import retrofit
from kvpop_lightning.cli import main
from kvpop_lightning.commands import generate as command
from kvpop_lightning.commands import generation as shared
from kvpop_lightning.errors import UserError
from kvpop_lightning.generation import Engine, Sampling, runners
from kvpop_lightning.generation.runners import GraphRunner
from kvpop_lightning.models.tiny import tiny_model, tiny_tokenizer
from kvpop_lightning.policy import Budget

PROMPTS = [list(range(5, 5 + n)) for n in (3, 40, 17, 25)]
SETTINGS = Sampling(max_new_tokens=6, ignore_eos=True)
TINY = ["model=tiny_llama", "policy=random", "max_new_tokens=4"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model():
    return retrofit(tiny_model("qwen3", max_position_embeddings=128), Budget(2, 8, 10), scorer="mlp")


def test_cancelling_one_of_three_leaves_the_others_as_they_are(model) -> None:
    alone = [Engine(model).generate([p], SETTINGS)[0][0].tokens for p in PROMPTS]
    engine = Engine(model, slots=2)
    numbers = [engine.submit(p, Sampling(6, ignore_eos=True, samples=2)) for p in PROMPTS[:3]]
    found: dict[tuple[int, int], Any] = {}
    for step in range(1000):
        if step == 2:
            engine.cancel(numbers[0])  # both of its samples, running
            engine.cancel(numbers[2])  # waiting
            numbers.append(engine.submit(PROMPTS[3], SETTINGS))
            engine.cancel(99)  # no such request
        for piece in engine.step():
            found[piece.completion.request, piece.completion.sample] = piece.completion
        if not engine.busy:
            break
    assert {place: one.finish for place, one in found.items()} == {
        (0, 0): "cancelled", (0, 1): "cancelled", (1, 0): "length", (1, 1): "length", (3, 0): "length",
    }  # fmt: skip
    assert found[1, 0].tokens == found[1, 1].tokens == alone[1]
    assert found[3, 0].tokens == alone[3]


def test_a_refused_prompt_among_others_starts_none(model) -> None:
    engine = Engine(model)
    for wrong, said in (([], "empty"), ([5] * 128, "128 positions")):
        with pytest.raises(UserError, match=said):
            engine.submit(wrong)
    assert not engine.busy
    assert engine.generate([], SETTINGS) == []
    with pytest.raises(UserError, match="empty"):
        Engine(model, tiny_tokenizer()).submit("")


def test_pieces_of_a_stream_are_the_whole_text(model) -> None:
    settings = Sampling(max_new_tokens=20, temperature=1.3, seed=3, ignore_eos=True)
    pieces = list(Engine(model, tiny_tokenizer()).stream("one two", settings))
    whole = Engine(model, tiny_tokenizer()).generate(["one two"], settings)[0][0]
    assert len(pieces) == 20
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.completion.finish for piece in pieces][-1] == "length"


def test_filters_hold_for_each_request_of_a_batch(model) -> None:
    """Rows of one batch with settings of their own give what each gives alone; one is greedy by top_k."""
    each = [
        Sampling(8, 1.5, seed=1, ignore_eos=True),
        Sampling(8, 1.5, top_k=1, seed=1, ignore_eos=True),
        Sampling(8, 1.5, top_p=1e-6, seed=1, ignore_eos=True),
        Sampling(8, 1.5, min_p=1.0, seed=1, ignore_eos=True),
    ]
    prompts = [PROMPTS[1]] * 4
    together = [row[0].tokens for row in Engine(model, slots=4).generate(prompts, each)]
    greedy = Engine(model).generate([PROMPTS[1]], Sampling(8, ignore_eos=True))[0][0].tokens
    assert together[1] == together[2] == together[3] == greedy
    assert together[0] != greedy


def test_a_gpu_that_has_no_room_for_a_step_says_so(model, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    stand_in = SimpleNamespace(FusedDecoder=lambda *_: None, capture=full)  # no GPU, no triton needed here
    monkeypatch.setitem(sys.modules, "kvpop_lightning.generation.fused", stand_in)
    with pytest.raises(UserError, match=r"slots=3 leave no memory for a step \(9 MiB were free\)"):
        GraphRunner(model, 3, available=9 * 2**20)
    with pytest.raises(UserError, match=r"slots=5000 do not fit .*at most \d+ do"):
        GraphRunner(model, 5000, available=9 * 2**20)


def line_of(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    assert main(words) == status
    out, err = capsys.readouterr()
    assert not out.strip()
    return err.splitlines()[-1]


def test_slots_that_do_not_fit_from_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "free_bytes", lambda device: 500_000)
    line = line_of(["generate", "hi", *TINY, "samples=40", "slots=40", "policy.budget.topk=50"], capsys)
    assert line.startswith("error: slots=40 do not fit")
    assert "at most" in line


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB\nmore"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:116] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_memory_that_runs_out_is_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(runners, "read_text", fails)
    for name in ("generate", "chat"):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        words = ["hi"] if name == "generate" else []
        line = line_of([name, *words, *TINY], capsys)
        assert line.startswith("error: out of memory (")
        assert "generate.chunk=256" in line


def test_other_errors_are_not_called_memory() -> None:
    with pytest.raises(RuntimeError, match="shape"), shared.memory_named(None):  # type: ignore[arg-type]
        raise RuntimeError("a shape")


@pytest.mark.parametrize("words", [[], ["   "], ["prompt=-"]])
def test_an_empty_prompt_is_missing(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    said = "standard input was empty" if words == ["prompt=-"] else "generate.prompt is missing"
    assert said in line_of(["generate", *words, *TINY], capsys)


def test_bytes_that_are_no_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = b"ab\xff".decode(errors="surrogateescape")
    assert "not UTF-8 text (character 3)" in line_of(["generate", broken, *TINY], capsys)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{broken}\nhello\n"))
    assert main(["chat", *TINY]) == 0
    err = capsys.readouterr().err
    assert "error: the message is not UTF-8 text" in err
    assert err.count("keys held per head") == 1  # the next message is answered


def test_ctrl_c_shows_what_there_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show: Callable[..., None] = command._Screen.show
    seen: list[str] = []

    def pressed(self: Any, sample: int, piece: str, *more: Any) -> None:
        show(self, sample, piece, *more)
        seen.append(piece)
        if len(seen) == 12:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(command._Screen, "show", pressed)
    assert main(["generate", "hello", *TINY, "max_new_tokens=500", "ignore_eos=true"]) == 130
    out, err = capsys.readouterr()
    assert out == "".join(seen) + "\n"
    assert out.strip()
    assert "keys held per head" in err.splitlines()[-2]
    assert err.splitlines()[-1] == "interrupted"
