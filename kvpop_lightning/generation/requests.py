"""What the engine knows of a request: waiting, running, and what it has given so far."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvpop_lightning.generation.sampling import Sampling
from kvpop_lightning.generation.text import TextStream


@dataclass
class Completion:
    """One continuation of one prompt, growing until `finish` says why it ended."""

    request: int
    sample: int
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    """`end` (the model's end token), `stop` (a stop string), `length`, `positions`, `cancelled`."""
    slot: int = -1
    kept: Any = field(default=None, repr=False)
    """What the text left behind, when it was asked for: `submit(after=...)` goes on from there."""

    unread: list[int] = field(default_factory=list)
    """Tokens of it that the model has not read: the last one, unless the end token came behind it."""

    @property
    def position(self) -> int:
        """Tokens read: the prompt's and its own, those `unread` left out."""
        return self.prompt_tokens + len(self.tokens) - len(self.unread)


@dataclass(frozen=True)
class Piece:
    """What a step added to a continuation: text may be empty, `completion.finish` set at the last one."""

    completion: Completion
    text: str


@dataclass(eq=False)
class Waiting:
    """A prompt that has no slot yet, or not one for each of its samples."""

    request: int
    tokens: list[int]
    settings: Sampling
    start: int = 0
    """Tokens that the cache of an ended continuation holds, which this prompt goes on from."""
    cache: Any = None
    """That cache."""
    keep: bool = False
    sample: int = 0
    read: tuple[Any, Tensor] | None = None


@dataclass
class Running:
    """A continuation in its slot."""

    completion: Completion
    settings: Sampling
    numbers: random.Random
    logits: Tensor
    text: TextStream | None
    keep: bool
