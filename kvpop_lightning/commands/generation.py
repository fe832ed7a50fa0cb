"""What `generate` and `chat` share: an engine from the settings, the prompt's tokens, figures beside the
text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kvpop_lightning.config.schema import Config, GenerateConfig
from kvpop_lightning.errors import UserError
from kvpop_lightning.generation import Engine, Sampling
from kvpop_lightning.generation.runners import Held, full_bytes


@dataclass(frozen=True)
class Progress:
    """Where a generation stands."""

    tokens_seen: int
    keys_held: int
    """Per layer and KV head."""
    bytes_held: int
    full_bytes: int
    """What a cache that keeps every key and value would hold now."""
    tokens_per_second: float

    def line(self) -> str:
        share = self.bytes_held / self.full_bytes if self.full_bytes else 1.0
        return (
            f"{self.tokens_seen} tokens seen | {self.keys_held} keys held per head | "
            f"{size_text(self.bytes_held)} held, a full cache {size_text(self.full_bytes)} ({share:.0%}) | "
            f"{self.tokens_per_second:.1f} tokens/s"
        )


@dataclass
class Meter:
    """Turns what a text holds into a `Progress`, with the time since it was made."""

    model: Any
    started: float = field(default_factory=time.perf_counter)

    def progress(self, seen: int, held: Held, worked: int | None = None) -> Progress:
        """`worked`: tokens read or generated since the start; None = all of them."""
        elapsed = max(time.perf_counter() - self.started, 1e-9)
        speed = (seen if worked is None else worked) / elapsed
        return Progress(seen, held.keys, held.bytes, full_bytes(self.model, seen), speed)


def sampling(config: Config) -> Sampling:
    """`generate.*` as the engine takes it."""
    wanted = config.generate
    return Sampling(
        max_new_tokens=wanted.max_new_tokens, temperature=wanted.temperature, top_k=wanted.top_k,
        top_p=wanted.top_p, min_p=wanted.min_p, seed=config.seed, samples=wanted.samples,
        stop=tuple(wanted.stop), ignore_eos=wanted.ignore_eos,
    )  # fmt: skip


def make_engine(model: Any, tokenizer: Any, config: Config, *, slots: int) -> Engine:
    """The engine that `generate.*` asks for."""
    wanted = config.generate
    return Engine(
        model, tokenizer, slots=slots, chunk=wanted.chunk, backend=wanted.backend,
        beyond_positions=wanted.beyond_positions,
    )  # fmt: skip


def check_text(text: str, what: str) -> None:
    """Refuses bytes that are no text: a tokenizer takes none.

    Raises:
        UserError: `text` was not UTF-8 where it came from.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what} is not UTF-8 text (character {error.start + 1}): convert it first"
        ) from error


@contextmanager
def memory_named(config: Config) -> Iterator[None]:
    """Memory that runs out inside becomes one line that says what to lower.

    Raises:
        UserError: in place of torch's own error, on a GPU or a CPU.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        cpu = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
        if not cpu and not isinstance(error, torch.OutOfMemoryError):
            raise
        said = next(iter(str(error).splitlines()), "")
        wanted = config.generate
        raise UserError(
            f"out of memory ({said[:200]}): lower generate.slots={wanted.slots}, "
            f"generate.chunk={wanted.chunk} or policy.budget, use model.dtype=bfloat16 or a smaller model"
        ) from error


def encode(tokenizer: Any, prompt: str, settings: GenerateConfig) -> list[int]:
    """Token ids; through the chat template when the tokenizer has one and `generate.chat_template` asks
    for it."""
    if has_template(tokenizer, settings):
        messages = [{"role": "system", "content": settings.system}] if settings.system else []
        messages.append({"role": "user", "content": prompt})
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(whole, add_special_tokens=False)["input_ids"])
    whole = f"{settings.system}\n\n{prompt}" if settings.system else prompt
    return list(tokenizer(whole)["input_ids"])


def has_template(tokenizer: Any, settings: GenerateConfig) -> bool:
    return bool(settings.chat_template and getattr(tokenizer, "chat_template", None))


_ANSWER = "the answer so far"


def encode_next(tokenizer: Any, message: str, settings: GenerateConfig) -> list[int]:
    """What follows an answer of the model up to its next one: the end of its turn, `message`, the next
    turn's beginning.

    Taken from the template's own rendering of a conversation, behind an answer that stands in it; the
    answer's tokens in the cache are those that were generated, never rendered again.
    """
    if not has_template(tokenizer, settings):
        return list(tokenizer(f"\n\n{message}", add_special_tokens=False)["input_ids"])
    messages = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": message},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    behind = whole[whole.index(_ANSWER) + len(_ANSWER) :]
    return list(tokenizer(behind, add_special_tokens=False)["input_ids"])


def size_text(count: int) -> str:
    """`1.5 MiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"
