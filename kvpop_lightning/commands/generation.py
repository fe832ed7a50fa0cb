"""Token by token through a cache: prompt in chunks, sampling, text as soon as it is whole, figures beside
it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.config.schema import Config, GenerateConfig
from kvpop_lightning.models.compat import cache_keyword


@dataclass(frozen=True)
class Progress:
    """Where a generation stands."""

    tokens_seen: int
    new_tokens: int
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
            f"{_size(self.bytes_held)} held, a full cache {_size(self.full_bytes)} ({share:.0%}) | "
            f"{self.tokens_per_second:.1f} tokens/s"
        )


@torch.inference_mode()
def stream(model: Any, tokenizer: Any, prompt: str, config: Config) -> Iterator[tuple[str, Progress]]:
    """New text with the state after it; first, with empty text, once per prompt chunk."""
    settings = config.generate
    ids = encode(tokenizer, prompt, settings).to(next(model.parameters()).device)
    cache = _new_cache(model, settings)
    keyword = cache_keyword(model)
    generator = torch.Generator(device="cpu").manual_seed(config.seed)
    stops, text, started = _stop_tokens(model, tokenizer), _TextStream(tokenizer), time.perf_counter()
    seen, new = 0, 0

    def progress() -> Progress:
        elapsed = max(time.perf_counter() - started, 1e-9)
        return Progress(seen, new, *_held(model, cache, seen), seen / elapsed)

    logits = None
    for chunk in ids.split(settings.chunk, dim=1):
        logits = model(chunk, **{keyword: cache}, use_cache=True, logits_to_keep=1).logits
        seen += chunk.shape[1]
        yield "", progress()
    assert logits is not None
    while new < settings.max_new_tokens:
        token = sample(logits[0, -1], settings, generator)
        if token in stops:
            break
        new += 1
        yield text.push(token), progress()
        if new < settings.max_new_tokens:
            one = torch.tensor([[token]], device=ids.device)
            logits = model(one, **{keyword: cache}, use_cache=True, logits_to_keep=1).logits
            seen += 1
    yield text.rest(), progress()


def encode(tokenizer: Any, prompt: str, settings: GenerateConfig) -> Tensor:
    """int64 [1, T]; through the chat template when the tokenizer has one and `generate.chat_template`
    asks for it."""
    if settings.chat_template and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "system", "content": settings.system}] if settings.system else []
        messages.append({"role": "user", "content": prompt})
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(whole, add_special_tokens=False, return_tensors="pt")["input_ids"]
    whole = f"{settings.system}\n\n{prompt}" if settings.system else prompt
    return tokenizer(whole, return_tensors="pt")["input_ids"]


def sample(logits: Tensor, settings: GenerateConfig, generator: torch.Generator) -> int:
    """Greedy at temperature 0, else from the smallest set of tokens with at least `top_p` of the mass.
    logits [V]."""
    if settings.temperature == 0:
        return int(logits.argmax())
    probability, order = (logits.float().cpu() / settings.temperature).softmax(0).sort(descending=True)
    before = probability.cumsum(0) - probability
    probability[before >= settings.top_p] = 0
    return int(order[torch.multinomial(probability, 1, generator=generator)])


def _new_cache(model: Any, settings: GenerateConfig) -> Any:
    if getattr(model, "kvpop", None) is None:
        from transformers import DynamicCache

        return DynamicCache(config=model.config)
    from kvpop_lightning.cache import BoundedCache

    return BoundedCache(model, record=False)


def _held(model: Any, cache: Any, seen: int) -> tuple[int, int, int]:
    """Keys per head, bytes held, bytes of a full cache."""
    keys = cache.layers[0].keys  # [1, Hkv, n, D]
    per_token = sum(2 * layer.keys[0, :, 0].numel() * layer.keys.element_size() for layer in cache.layers)
    if getattr(model, "kvpop", None) is None:
        return keys.shape[2], per_token * keys.shape[2], per_token * seen
    return cache.keys_held, cache.bytes_held(), per_token * seen


def _stop_tokens(model: Any, tokenizer: Any) -> set[int]:
    found = [getattr(model.generation_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    flat = [token for item in found for token in (item if isinstance(item, list) else [item])]
    return {int(token) for token in flat if token is not None}


class _TextStream:
    """Tokens to text: a token's text is given out once no later token can change it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0
        """First token decoded again, so that joins between tokens come out right."""
        self._given = 0
        """Tokens whose text was given out."""

    def push(self, token: int) -> str:
        self._ids.append(token)
        return self._new(last=False)

    def rest(self) -> str:
        return self._new(last=True)

    def _new(self, *, last: bool) -> str:
        before = self._decode(self._ids[self._start : self._given])
        now = self._decode(self._ids[self._start :])
        if not last and (now.endswith("�") or len(now) <= len(before)):
            return ""  # half a character
        self._start, self._given = self._given, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"
