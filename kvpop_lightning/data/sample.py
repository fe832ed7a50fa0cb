"""Realistic text for tests, benchmarks and pictures, without a data set."""

from __future__ import annotations

import re
from typing import Any

from kvpop_lightning.data import families
from kvpop_lightning.data.problem import Problem

# Digits are single tokens for SmolLM2 and many others, and words often need two: counting a word as one is a
# floor.
_PIECES = re.compile(r"\d|[^\W\d]+|[^\w\s]")


def least_tokens(text: str) -> int:
    """A count that common tokenizers with single-digit tokens do not fall below."""
    return len(_PIECES.findall(text))


def sample_text(kind: str, seed: int, min_tokens: int, tokenizer: Any = None) -> str:
    """A problem with its worked solution as plain text of at least `min_tokens` tokens.

    Args:
        kind: name of a family, or `mixed` (the seed picks one that is not held out) or `held_out`.
        seed: determines the text.
        min_tokens: counted by `tokenizer`, or by a lower bound for tokenizers with single-digit tokens.

    Raises:
        UserError: an unknown family.
    """
    if kind in ("mixed", "held_out"):
        names = families.available(held_out=kind == "held_out")
        kind = names[seed % len(names)]

    def text(problem: Problem) -> str:
        return f"{problem.question}\n\n{problem.solution}\n"

    def count(problem: Problem) -> int:
        if tokenizer is None:
            return least_tokens(text(problem))
        return len(tokenizer(text(problem), add_special_tokens=False, verbose=False)["input_ids"])

    return text(families.problem_of_length(kind, f"sample/{seed}", min_tokens, count))
