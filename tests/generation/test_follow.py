"""Texts that are gone on with: kept continuations, and rows of the step kernels' state handed back."""

from __future__ import annotations

import pytest
import torch

from kvpop_lightning import BoundedCache, retrofit
from kvpop_lightning.cache.step_state import StepState, keeps_waiting
from kvpop_lightning.errors import UserError
from kvpop_lightning.generation import Engine, Sampling
from kvpop_lightning.generation.runners import PlainRunner, full_bytes, make_runner, read_text
from kvpop_lightning.models.tiny import tiny_model
from kvpop_lightning.policy import Budget

SETTINGS = Sampling(max_new_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return retrofit(tiny_model("qwen3", max_position_embeddings=128), Budget(2, 8, 10), scorer="mlp")


def last(engine: Engine, *given, **more):
    return [piece.completion for piece in engine.stream(*given, **more)][-1]


@pytest.mark.parametrize("full", [False, True])
def test_a_kept_text_goes_on_as_if_read_in_one(model, full: bool) -> None:
    used = tiny_model("qwen3", max_position_embeddings=128) if full else model
    engine, first, second = Engine(used, slots=2), list(range(5, 35)), [40, 41, 42]
    done = last(engine, first, SETTINGS, keep=True)
    beside = engine.submit([7, 8, 9], SETTINGS)  # another text in the slot it left
    follow = last(engine, second, SETTINGS, after=done)
    assert follow.request != beside
    whole = last(Engine(used, chunk=4), [*first, *done.tokens, *second], SETTINGS)
    assert follow.tokens == whole.tokens
    assert follow.prompt_tokens == whole.prompt_tokens == 39
    with pytest.raises(UserError, match="nothing is kept"):
        engine.submit(second, SETTINGS, after=done)  # used up
    with pytest.raises(UserError, match="nothing is kept"):
        engine.submit(second, SETTINGS, after=last(engine, first, SETTINGS))


def test_positions_count_the_whole_conversation(model) -> None:
    engine = Engine(model)
    done = last(engine, [5] * 100, SETTINGS, keep=True)
    with pytest.raises(UserError, match="behind 105 others"):
        engine.submit([6] * 25, SETTINGS, after=done)
    follow = last(engine, [6] * 15, Sampling(max_new_tokens=50, ignore_eos=True), after=done)
    assert follow.finish == "positions"
    assert follow.prompt_tokens + len(follow.tokens) == 128


def test_a_cancelled_text_is_kept_up_to_where_it_was(model) -> None:
    engine = Engine(model)
    number = engine.submit([5, 6, 7], SETTINGS, keep=True)
    for _ in range(3):
        done = engine.step()[0].completion
    engine.cancel(number)
    assert (done.finish, len(done.tokens), done.unread) == ("cancelled", 3, [])
    whole = last(Engine(model), [5, 6, 7, *done.tokens, 9], SETTINGS)
    assert last(engine, [9], SETTINGS, after=done).tokens == whole.tokens


@pytest.mark.parametrize(
    ("options", "delay"),
    [
        ({"scorer": "mlp"}, None),
        ({"scorer": "linear"}, None),
        ({"scorer": "mlp", "inputs": "kv_hidden"}, None),
        ({"policy": "random"}, None),
        ({"policy": "streaming_llm"}, None),
        ({"scorer": "mlstm", "memory_dim": 4, "value_dim": 6}, 8),
        ({"scorer": "mlstm", "memory_dim": 4, "value_dim": 6}, 3),
    ],
)
@pytest.mark.parametrize("length", [5, 14, 60])
def test_a_row_handed_back_is_the_cache_that_was_taken_over(
    options: dict, delay: int | None, length: int
) -> None:
    more = {} if delay is None else {"delay": delay}
    model = retrofit(tiny_model("llama"), Budget(2, 8, 10), decay=0.8, decay_step=4, **options, **more)
    scorer = model.kvpop.layer_scorer(0)
    state = StepState.empty(
        model.kvpop.budget, layers=2, rows=3, heads=2, head_dim=16, dtype=torch.float32, device="cpu",
        memory=scorer.init_state(1, "cpu"), waiting=keeps_waiting(scorer, model.kvpop.budget),
    )  # fmt: skip
    cache, tokens = BoundedCache(model, record=False), list(range(5, 5 + length))
    with torch.no_grad():
        read_text(model, cache, tokens, 7)
        state.take_over(1, cache)
        back = state.give_back(1, model)
        assert back.tokens_seen == length
        assert back.keys_held == cache.keys_held
        for n in range(40):
            wanted = read_text(model, cache, [3 + 5 * n % 200], 1)
            assert torch.allclose(read_text(model, back, [3 + 5 * n % 200], 1), wanted, atol=1e-5)
    for ours, theirs in zip(back.layers, cache.layers, strict=True):
        assert torch.equal(ours.position, theirs.position)


def test_too_many_slots_say_how_many_fit(model) -> None:
    size = model.kvpop.bytes_per_sequence(4)
    with pytest.raises(UserError, match=r"slots=9 do not fit.*at most 4 do"):
        PlainRunner(model, 9, available=5 * size + 1)
    PlainRunner(model, 4, available=5 * size + 1)
    with pytest.raises(UserError, match="do not fit"):
        make_runner(model, 10**9)


def test_what_a_slot_holds(model) -> None:
    engine = Engine(model)
    done = last(engine, [5] * 50, SETTINGS)
    held = engine.held(done)
    assert (held.keys, held.bytes) == (20, bytes_of_a_cache(model))
    assert full_bytes(model, 50) == 2 * 2 * 2 * 16 * 4 * 50


def bytes_of_a_cache(model) -> int:
    cache = BoundedCache(model, record=False)
    with torch.no_grad():
        model(torch.tensor([[5]]), past_key_values=cache, use_cache=True)
    return cache.bytes_held()
