"""The engine on the CPU: slots, seeds, stops, faults; and the order of requests changes nothing."""

from __future__ import annotations

import pytest
import torch

from kvpop_lightning import BoundedCache, retrofit
from kvpop_lightning.errors import UserError
from kvpop_lightning.generation import Engine, Sampling
from kvpop_lightning.generation.runners import check_fits
from kvpop_lightning.generation.sampling import choose
from kvpop_lightning.generation.text import TextStream
from kvpop_lightning.models.tiny import tiny_model, tiny_tokenizer
from kvpop_lightning.policy import Budget

PROMPTS = [list(range(5, 5 + n)) for n in (3, 40, 17, 25)]


@pytest.fixture(scope="module")
def model():
    return retrofit(tiny_model("qwen3", max_position_embeddings=128), Budget(2, 8, 10), scorer="mlp")


def tokens(found) -> list[list[int]]:
    return [one.tokens for row in found for one in row]


def test_greedy_equals_a_plain_loop(model) -> None:
    cache, ids, loop = BoundedCache(model), torch.tensor([PROMPTS[1]]), []
    with torch.no_grad():
        for _ in range(12):
            ids = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            loop.append(int(ids))
    settings = Sampling(max_new_tokens=12, ignore_eos=True)
    assert tokens(Engine(model, chunk=7).generate([PROMPTS[1]], settings)) == [loop]


def test_neither_order_nor_slots_change_a_request(model) -> None:
    settings = [
        Sampling(max_new_tokens=5 + n, temperature=0.9 * (n % 2), top_p=0.9, seed=n, ignore_eos=True)
        for n in range(4)
    ]
    alone = [tokens(Engine(model).generate([p], [s]))[0] for p, s in zip(PROMPTS, settings, strict=True)]
    for slots in (1, 2, 4):
        assert tokens(Engine(model, slots=slots).generate(PROMPTS, settings)) == alone
    back = Engine(model, slots=3).generate(PROMPTS[::-1], settings[::-1])
    assert tokens(back)[::-1] == alone
    assert alone[1] != tokens(Engine(model).generate([PROMPTS[1]], [Sampling(6, 0.9, top_p=0.9, seed=7)]))[0]


def test_samples_read_the_prompt_once(model) -> None:
    engine = Engine(model, slots=2)
    reads = []
    read = engine.runner.read
    engine.runner.read = lambda *given: reads.append(1) or read(*given)  # type: ignore[method-assign]
    settings = Sampling(max_new_tokens=8, temperature=1.0, samples=3, seed=1, ignore_eos=True)
    found = tokens(engine.generate([PROMPTS[2]], settings))
    assert len(reads) == 1
    assert len(found) == 3
    assert len({tuple(one) for one in found}) == 3
    assert tokens(Engine(model, slots=3).generate([PROMPTS[2]], settings)) == found


def test_stop_strings_end_the_text_before_them() -> None:
    stream, tokenizer = TextStream(tiny_tokenizer(), ("END", "N!")), tiny_tokenizer()
    given = []
    for token in tokenizer("one EN two END three")["input_ids"]:
        given.append(stream.push(token))
        if stream.stopped:
            break
    assert "".join(given) + stream.rest() == "one EN two "
    assert "E" not in "".join(given[:5])  # held back until it cannot begin "END" any more


def test_engine_stops_at_a_stop_string(model) -> None:
    whole = Engine(model, tiny_tokenizer()).generate(["ab"], Sampling(max_new_tokens=20, ignore_eos=True))[0][
        0
    ]
    printable = [c for c in whole.text if c.isascii()]
    stop = printable[len(printable) // 2]
    cut = Engine(model, tiny_tokenizer()).generate(["ab"], Sampling(20, stop=(stop,), ignore_eos=True))[0][0]
    assert cut.finish == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_cancelled_requests_leave_no_trace(model) -> None:
    engine = Engine(model, slots=1)
    settings = Sampling(max_new_tokens=6, ignore_eos=True)
    first, second = engine.submit(PROMPTS[0], settings), engine.submit(PROMPTS[1], settings)
    piece = engine.step()[0]
    engine.cancel(first)
    assert piece.completion.finish == "cancelled"
    got = None
    while engine.busy:
        for piece in engine.step():
            if got is None and piece.completion.request == first:
                assert (piece.completion.finish, piece.text) == ("cancelled", ""), "its last piece"
                continue
            assert piece.completion.request == second
            got = piece.completion
    assert got is not None
    assert [got.tokens] == tokens(Engine(model).generate([PROMPTS[1]], settings))
    stream = engine.stream(PROMPTS[0], settings)
    next(stream)
    stream.close()
    assert not engine.busy


@pytest.mark.parametrize("slots", [1, 2])
def test_each_stream_gets_its_own_pieces(model, slots: int) -> None:
    settings = Sampling(max_new_tokens=4, ignore_eos=True)
    engine = Engine(model, slots=slots)
    alone = tokens(engine.generate(PROMPTS[:3], settings))
    raw = engine.submit(PROMPTS[2], settings)
    a, b = engine.stream(PROMPTS[0], settings), engine.stream(PROMPTS[1], settings)
    seen = {0: [next(a)], 1: [next(b)]}
    inside = tokens(engine.generate([PROMPTS[2]], settings))
    seen[0] += list(a)
    seen[1] += list(b)
    assert inside == alone[2:]
    for number in (0, 1):
        assert len(seen[number]) == 4
        assert seen[number][-1].completion.tokens == alone[number]
    left = []
    while engine.busy:
        left += engine.step()
    assert {piece.completion.request for piece in left} == {raw}
    assert left[-1].completion.tokens == alone[2]
    assert len(left) == 4


def test_a_failing_call_leaves_nothing_behind(model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, settings = Engine(model), Sampling(max_new_tokens=3, ignore_eos=True)
    expected = tokens(engine.generate([PROMPTS[0]], settings))

    def fails(piece: object) -> None:
        raise RuntimeError("the caller's own")

    for prompts, options, kind, said in (
        ([PROMPTS[0], [5, 10**6]], {}, UserError, "token id 1000000"),
        ([PROMPTS[0], [-1]], {}, UserError, "token id -1"),
        ([PROMPTS[0], []], {}, UserError, "empty"),
        ([PROMPTS[0], [1.5]], {}, UserError, "list of token ids"),
        ("text", {}, UserError, "must be a list"),
        (PROMPTS[:2], {"settings": [settings]}, UserError, "2 prompts and 1 settings"),
        ([PROMPTS[0]], {"settings": settings, "on_piece": fails}, RuntimeError, "own"),
    ):
        with pytest.raises(kind, match=said):
            engine.generate(prompts, **options)  # type: ignore[arg-type]
        assert not engine.busy
    # A prompt that cannot be read takes none of the others with it.
    good = engine.submit(PROMPTS[0], settings)
    bad = engine.submit([7, 7], settings)
    read = engine.runner.read

    def refuses(given: list[int], *rest: object) -> object:
        if given == [7, 7]:
            raise RuntimeError("out of memory")
        return read(given, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "read", refuses)
    stream = engine.stream(PROMPTS[0], settings)
    assert [piece.completion.tokens for piece in stream][-1:] == expected, "not its prompt that failed"
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    pieces = []
    while engine.busy:
        pieces += engine.step()
    with pytest.raises(RuntimeError, match="out of memory"):
        list(engine.stream([7, 7], settings))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate([PROMPTS[0], [7, 7]], settings)
    assert not engine.busy
    # It may fail while somebody else, here a call within the call, drives the engine.
    narrow = Engine(model, slots=1)
    monkeypatch.setattr(narrow.runner, "read", refuses)
    inside = iter([True])

    def drives(piece: object) -> None:
        if next(inside, False):
            narrow.generate([PROMPTS[0]], settings)

    with pytest.raises(RuntimeError, match="out of memory"):
        narrow.generate([PROMPTS[0], [7, 7], [7, 7]], settings, drives)
    assert not narrow.busy
    assert bad not in {piece.completion.request for piece in pieces}
    assert [piece.completion.tokens for piece in pieces if piece.completion.request == good][-1:] == expected


def test_what_was_kept_is_gone_on_with_once(model) -> None:
    engine, settings = Engine(model, slots=1), Sampling(max_new_tokens=3, ignore_eos=True)
    done = list(engine.stream(PROMPTS[1], settings, keep=True))[-1].completion
    first = engine.submit([7, 8], settings, after=done)
    with pytest.raises(UserError, match="nothing is kept"):
        engine.submit([7, 8], settings, after=done)
    engine.cancel(first)


def test_cancelled_while_it_is_read(model) -> None:
    settings = Sampling(max_new_tokens=3, ignore_eos=True)
    expected = tokens(Engine(model).generate(PROMPTS[2:], settings))
    engine = Engine(model, slots=1, chunk=8)
    engine.on_read = lambda seen, cache: engine.cancel(number) if seen == 16 else None
    number = engine.submit(PROMPTS[1], settings)
    others = [engine.submit(prompt, settings) for prompt in PROMPTS[2:]]
    last = {}
    while engine.busy:
        for piece in engine.step():
            last[piece.completion.request] = piece.completion.tokens
            number = others[0] + 9  # nothing more is cancelled
    assert [last[other] for other in others] == expected
    assert set(last) == set(others)


def test_a_step_that_fails_ends_its_texts(model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, settings = Engine(model), Sampling(max_new_tokens=4, ignore_eos=True)
    expected = tokens(engine.generate([PROMPTS[0]], settings))
    step = engine.runner.step

    def fails(given: dict[int, int]) -> object:
        raise RuntimeError("out of memory")

    engine.submit(PROMPTS[0], settings)
    monkeypatch.setattr(engine.runner, "step", fails)
    with pytest.raises(RuntimeError):
        engine.step()
    monkeypatch.setattr(engine.runner, "step", step)
    assert [piece.completion.finish for piece in engine.step()] == ["cancelled"] * 2, "its token, and its end"
    assert not engine.busy
    assert tokens(engine.generate([PROMPTS[0]], settings)) == expected


def test_logits_that_are_no_numbers_give_a_token() -> None:
    for logits in (torch.full((1, 9), torch.nan), torch.full((1, 9), -torch.inf)):
        for more in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
            [token] = choose(logits, [Sampling(temperature=1.0, **more)], [0.5])  # type: ignore[arg-type]
            assert 0 <= token < 9


def test_positions(model) -> None:
    with pytest.raises(UserError, match="128 positions"):
        Engine(model).submit([5] * 128)
    done = Engine(model).generate([[5] * 120], Sampling(max_new_tokens=50, ignore_eos=True))[0][0]
    assert (done.finish, len(done.tokens)) == ("positions", 8)
    engine = Engine(model, beyond_positions=True)
    done = engine.generate([[5] * 130], Sampling(max_new_tokens=4, ignore_eos=True))[0][0]
    assert done.finish == "length"


@pytest.mark.parametrize("policy", ["tova", "streaming_llm", None])
def test_baselines_and_the_full_cache_run_on_it(policy: str | None) -> None:
    base = tiny_model("llama")
    if policy:
        base = retrofit(base, Budget(2, 8, 10), policy=policy)
    settings = Sampling(max_new_tokens=6, ignore_eos=True)
    found = tokens(Engine(base, slots=2).generate(PROMPTS[:3], settings))
    assert [len(one) for one in found] == [6, 6, 6]
    assert found[1:2] == tokens(Engine(base).generate(PROMPTS[1:2], settings))


def test_refusals(model) -> None:
    engine = Engine(model)
    for prompt, match in (([], "empty"), ("text", "tokenizer")):
        with pytest.raises(UserError, match=match):
            engine.submit(prompt)
    with pytest.raises(UserError, match="CUDA"):
        Engine(model, backend="graph")
    with pytest.raises(UserError, match="at most 2 do"):
        check_fits(4, 1000, 3500)
    for wrong in (
        {"top_p": 0.0},
        {"min_p": 2.0},
        {"temperature": -1.0},
        {"max_new_tokens": 0},
        {"stop": "x"},
        {"max_new_tokens": 1.5},
        {"samples": True},
        {"temperature": "1"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sampling(**wrong)


def test_choice_of_tokens() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()

    def drawn(**settings: float) -> list[int]:
        one = Sampling(temperature=1.0, **settings)  # type: ignore[arg-type]
        return [choose(logits, [one], [u])[0] for u in (0.0, 0.39, 0.41, 0.69, 0.71, 0.89, 0.91, 0.999)]

    assert drawn() == [0, 1, 1, 2, 2, 3, 3, 3]
    assert drawn(top_p=0.9999) == [1, 1, 2, 2, 3, 3, 0, 0]
    assert set(drawn(top_k=2)) == {1, 2}
    assert set(drawn(top_p=0.65)) == {1, 2}
    assert set(drawn(min_p=0.45)) == {1, 2, 3}
    assert set(drawn(top_p=0.1)) == {1}
    assert choose(logits.expand(2, 4), [Sampling(), Sampling(temperature=1.0)], [0.99, 0.99]) == [1, 3]


def test_a_row_is_drawn_by_its_own_settings_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds: list[dict[str, float]] = [
        {}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.2}, {"temperature": 2.0, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
    ]  # fmt: skip
    settings = [Sampling(**kind) for kind in kinds] * 20  # type: ignore[arg-type]
    logits = 3 * torch.randn(len(settings), 37, generator=generator)
    logits[::7] = logits[::7].round()  # ties
    uniform = torch.rand(len(settings), generator=generator).tolist()
    uniform[:6], uniform[6:12] = [0.0] * 6, [1 - 2**-53] * 6
    together = choose(logits, settings, uniform)
    assert together == [
        choose(row[None], [s], [u])[0] for row, s, u in zip(logits, settings, uniform, strict=True)
    ]
    for row, one, u, token in zip(logits.double(), settings, uniform, together, strict=True):
        if not one.temperature:
            assert row[token] == row.max()
            continue
        share = (row / one.temperature).softmax(-1)
        order = sorted(range(len(share)), key=lambda at, s=share: (-s[at], at))
        left = order[: one.top_k or None]
        mass, kept = sum(share[at] for at in left), []
        for at in left:
            if kept and sum(share[k] for k in kept) / mass >= one.top_p:
                break
            kept.append(at)
        kept = [at for at in kept if share[at] >= one.min_p * share.max()]
        if not one.top_k and one.top_p == 1:
            kept.sort()
        reached = 0.0
        for at in kept:
            reached += float(share[at])
            if reached > u * float(sum(share[k] for k in kept)):
                break
        assert token == at
