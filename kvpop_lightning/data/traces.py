"""Traces sampled from the teacher itself: problems of any source, solutions of the model, as JSON lines.

Everything sampled goes into a journal beside the file, one line per problem and sample in the order of the
problems, so that an interrupted call goes on after the last whole line and gives the same bytes as one that
was not interrupted. The file itself holds the finished traces only: a trace cut at `max_new_tokens` would
teach the model to stop there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import IO, Any

from kvpop_lightning.config.schema import Config, DataConfig
from kvpop_lightning.data import families, reasoning
from kvpop_lightning.data.blocks import chosen_families
from kvpop_lightning.data.chat import ChatRenderer, Message, tokenizer_fingerprint
from kvpop_lightning.data.conversation import BadRowError
from kvpop_lightning.data.decontaminate import problem_of
from kvpop_lightning.data.progress import bar
from kvpop_lightning.data.rows import disk_message, write_whole
from kvpop_lightning.data.sources import make_source, source_identity
from kvpop_lightning.errors import UserError


@dataclass(frozen=True)
class Asked:
    """A problem and where it comes from; `answer` when the source says it."""

    text: str
    origin: str
    answer: str | None


@dataclass
class Sampled:
    """What a call did: traces by how they ended, of which `exact` come back token by token when tokenised
    again; `reused` of them were in the journal before."""

    path: Path
    ended: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    exact: int = 0
    reused: int = 0


def problems(config: DataConfig, renderer: ChatRenderer, skipped: Counter[str]) -> Iterator[Asked]:
    """The problems of `config`'s source in order, each once; what cannot be asked is counted in `skipped`.

    Raises:
        UserError: a source that cannot be read, or a row without a problem unless `data.on_bad_row=skip`.
    """
    if config.source == "procedural":
        yield from _procedural(config, renderer)
        return
    seen = set[bytes]()
    for row in make_source(config).rows():
        try:
            if isinstance(row.record, BadRowError):
                raise UserError(f"{row.where}: {row.record}")
            text = problem_of(row.record, row.where)
        except UserError as error:
            if config.on_bad_row == "error":
                raise UserError(f"{error} (data.on_bad_row=skip skips and counts such rows)") from error
            skipped["no_problem"] += 1
            continue
        key = hashlib.sha256(" ".join(text.split()).encode("utf-8", "surrogatepass")).digest()[:16]
        if key in seen:
            skipped["same_problem"] += 1
            continue
        seen.add(key)
        given = row.record.get("expected_answer", row.record.get("answer"))
        yield Asked(text, row.origin, None if given is None else str(given))


def _procedural(config: DataConfig, renderer: ChatRenderer) -> Iterator[Asked]:
    names = [name for name in chosen_families(config, "train") if name != reasoning.FAMILY]
    number = 0
    while True:
        seed = f"{config.seed}/traces/{number}"
        rng = random.Random(seed)
        low, high = math.log(config.min_document_tokens), math.log(config.max_document_tokens)
        tokens = math.floor(math.exp(rng.uniform(low, high)))
        if names:
            name = names[number % len(names)]
            made = families.problem_of_length(name, seed, tokens, lambda p: len(renderer(p.messages)))
        else:
            made = reasoning.short_problem(seed)
        yield Asked(made.question, f"{made.family} seed {seed}", made.answer)
        number += 1


def sample(model: Any, tokenizer: Any, config: Config, *, progress: bool = True) -> Sampled:
    """Samples `data.traces.samples` solutions of each of `data.traces.problems` problems from `model`.

    Returns when all are in `data.traces.path` (default: `traces.jsonl` in the run folder), whose rows hold
    `problem`, `messages`, `expected_answer` where the source gives one, and `provenance`.

    Raises:
        UserError: problems without end, a journal of other settings, an unreadable source, no space left.
    """
    from kvpop_lightning.generation import Engine, Sampling

    wanted = config.data.traces
    path = Path(wanted.path or Path(config.run_dir) / "traces.jsonl")
    if wanted.problems is None and config.data.source == "procedural":
        raise UserError("data.traces.problems must be set: the problems of data.source=procedural never end")
    settings = Sampling(wanted.max_new_tokens, wanted.temperature, top_p=wanted.top_p)
    renderer = ChatRenderer(tokenizer)
    header = _header(model, tokenizer, config)
    journal, done = _open_journal(path, header)
    told, skipped = Sampled(path, reused=done), Counter[str]()
    engine = Engine(model, tokenizer, slots=wanted.slots, chunk=config.generate.chunk)
    waiting: deque[tuple[int, Asked, int, str, list[int]]] = (
        deque()
    )  # request, problem, sample, opening, prompt
    finished: dict[int, Any] = {}
    asked_for = _that_fit(config.data, renderer, engine.positions, skipped)
    tasks = _tasks(asked_for, wanted.problems, wanted.samples)
    total = None if wanted.problems is None else wanted.problems * wanted.samples
    with journal, bar("sampling traces", total, done, progress) as advance:
        for number, (asked, index) in enumerate(tasks):
            if number < done:
                continue
            prompt, opening = prompt_of(renderer, asked.text)
            seed = _seed(config.seed, asked.text, index)
            request = engine.submit(prompt, replace(settings, seed=seed))
            waiting.append((request, asked, index, opening, prompt))
            # Twice the slots: a free slot never waits, and memory does not grow with the source.
            while len(waiting) >= 2 * wanted.slots:
                _advance(engine, finished, waiting, journal, renderer, header, advance)
        while waiting:
            _advance(engine, finished, waiting, journal, renderer, header, advance)
    _export(path, told)
    if not told.ended:
        raise UserError(
            f"{config.data.path or config.data.source} gave no problem to solve ({dict(skipped)})"
        )
    told.ended.update({f"skipped_{name}": count for name, count in skipped.items()})
    return told


def prompt_of(renderer: ChatRenderer, problem: str) -> tuple[list[int], str]:
    """Tokens that ask for a solution, and the text that the template has opened it with (a reasoning model's
    `<think>`), which belongs to the trace."""
    question: Message = {"role": "user", "content": problem}
    rendered = renderer([question, {"role": "assistant", "content": "\ue020"}])
    start = rendered.contents[-1][0]
    tokenizer = renderer.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        return rendered.input_ids[rendered.offsets[:, 0] < start].tolist(), ""
    opened = str(tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True))
    return list(tokenizer(opened, add_special_tokens=False, verbose=False)["input_ids"]), opened[start:]


def _that_fit(
    config: DataConfig, renderer: ChatRenderer, positions: int | None, skipped: Counter[str]
) -> Iterator[Asked]:
    """Problems that leave the model a position to answer in; longer ones are bad rows."""
    for asked in problems(config, renderer, skipped):
        tokens = len(prompt_of(renderer, asked.text)[0])
        if positions is None or tokens < positions:
            yield asked
        elif config.on_bad_row == "skip":
            skipped["longer_than_the_model"] += 1
        else:
            raise UserError(
                f"{asked.origin}: the problem has {tokens} tokens, the model {positions} positions "
                "(data.on_bad_row=skip skips and counts such problems)"
            )


def _tasks(asked: Iterator[Asked], limit: int | None, samples: int) -> Iterator[tuple[Asked, int]]:
    for number, problem in enumerate(asked):
        if number == limit:
            return
        for index in range(samples):
            yield problem, index


def _advance(
    engine: Any, finished: dict[int, Any], waiting: deque[Any], journal: FileIO,
    renderer: ChatRenderer, header: dict[str, Any], advance: Any,
) -> None:  # fmt: skip
    """One step of the engine; traces whose predecessors are all written are written too."""
    for piece in engine.step():
        if piece.completion.finish is not None:
            finished[piece.completion.request] = piece.completion
    while waiting and waiting[0][0] in finished:
        request, asked, index, opening, prompt = waiting.popleft()
        _write(journal, _line(finished.pop(request), asked, index, opening, prompt, renderer, header))
        advance(1)


def _line(
    done: Any, asked: Asked, index: int, opening: str, prompt: list[int],
    renderer: ChatRenderer, header: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    messages = [
        {"role": "user", "content": asked.text},
        {"role": "assistant", "content": opening + done.text},
    ]
    again = renderer(messages).input_ids.tolist()
    sampled = [*prompt, *done.tokens]
    answer = {} if asked.answer is None else {"expected_answer": asked.answer}
    return {
        "problem": asked.text,
        **answer,
        "messages": messages,
        "provenance": {
            **{name: header[name] for name in ("model", "weights", "temperature", "top_p", "max_new_tokens")},
            "seed": header["seed"],
            "sample": index,
            "origin": asked.origin,
            "finish": done.finish,
            "tokens": len(done.tokens),
            "exact": again[: len(sampled)] == sampled,
        },
    }


def _seed(seed: int, problem: str, index: int) -> int:
    """Of one trace: from the problem itself, so that neither order nor a resume changes what is sampled."""
    text = f"{seed}/{index}/{problem}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:6], "big")


def _header(model: Any, tokenizer: Any, config: Config) -> dict[str, Any]:
    """First line of the journal: everything that the traces depend on but their number."""
    from kvpop_lightning.models.fingerprint import base_fingerprint

    wanted = config.data.traces
    return {
        "model": config.model.path or config.model.name,
        "weights": base_fingerprint(model)[:16],
        "tokenizer": tokenizer_fingerprint(tokenizer)[:16],
        "source": config.data.source,
        "problems_from": source_identity(config.data),
        "data_seed": config.data.seed,
        "temperature": wanted.temperature,
        "top_p": wanted.top_p,
        "max_new_tokens": wanted.max_new_tokens,
        "samples": wanted.samples,
        "seed": config.seed,
    }


def _open_journal(path: Path, header: dict[str, Any]) -> tuple[FileIO, int]:
    """The journal, open behind its last whole line, and the number of traces in it."""
    file = journal_of(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        whole, lines, first = 0, 0, b""
        with file.open("rb") as content:
            for raw in content:
                if not raw.endswith(b"\n"):  # the write that a kill cut off
                    break
                first = first or raw
                whole, lines = whole + len(raw), lines + 1
        if lines:
            found = json.loads(first)
            other = [name for name in header if found.get(name) != header[name]]
            if other:
                raise UserError(
                    f"{file} was sampled with another {', '.join(other)}; give another data.traces.path, or "
                    "delete it"
                )
        os.truncate(file, whole)
        stream = FileIO(file, "a")
    except OSError as error:
        raise UserError(disk_message(error, file)) from error
    if not lines:
        _write(stream, header)
    return stream, max(0, lines - 1)


def journal_of(path: Path) -> Path:
    """Where everything sampled for `path` is kept."""
    return path.with_name(path.name + ".journal")


def _write(stream: FileIO, content: dict[str, Any]) -> None:
    """Unbuffered: a line is in the file before the next one is begun, and a full disk is noticed here."""
    left = memoryview(json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    try:
        while left:
            left = left[stream.write(left) :]
    except OSError as error:
        raise UserError(disk_message(error, Path(str(stream.name)))) from error


def _export(path: Path, told: Sampled) -> None:
    """Writes the finished traces of the journal to `path`, whole or not at all, and counts."""

    def copy(out: IO[bytes]) -> None:
        with journal_of(path).open("rb") as lines:
            next(lines)
            for raw in lines:
                how = json.loads(raw)["provenance"]
                told.ended[how["finish"]] += 1
                told.tokens += how["tokens"]
                told.exact += how["exact"]
                if how["finish"] == "end":
                    out.write(raw)

    write_whole(path, copy)
