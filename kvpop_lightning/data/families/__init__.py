"""Procedural mathematics: families of problems whose worked solutions keep looking up facts stated early.

A family is one function `write(script, rng, size, level)` in its own file, registered by `@family`. `size` is
the number of steps (the length of the solution grows with it), `level` from 1 to 3 sets how large the numbers
are. Held-out families serve evaluation only: no training row is drawn from them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvpop_lightning.data.problem import Problem, Script
from kvpop_lightning.errors import UserError

Writer = Callable[[Script, random.Random, int, int], None]

_FILES = (
    "assignments",
    "ledger",
    "long_division",
    "long_multiplication",
    "matrix_product",
    "modular_chain",
    "scheduling",
    "state_machine",
    "substitutions",
    "unit_chain",
    "codebook",
    "date_chain",
    "recipes",
    "road_trips",
)


@dataclass(frozen=True)
class Family:
    """A registered family: `write` writes one problem of `size` steps into a script."""

    name: str
    summary: str
    write: Writer
    held_out: bool


_REGISTRY: dict[str, Family] = {}


def family(name: str, summary: str, *, held_out: bool = False) -> Callable[[Writer], Writer]:
    """Registers `write` under `name`."""

    def register(write: Writer) -> Writer:
        assert name not in _REGISTRY, f"family {name} registered twice"
        _REGISTRY[name] = Family(name, summary, write, held_out)
        return write

    return register


def _load() -> dict[str, Family]:
    for file in _FILES:
        import_module(f"{__name__}.{file}")
    return _REGISTRY


def available(*, held_out: bool | None = None) -> list[str]:
    """Names of all families, or of those (not) held out, sorted."""
    return sorted(name for name, entry in _load().items() if held_out in (None, entry.held_out))


def get(name: str) -> Family:
    """The family of that name.

    Raises:
        UserError: there is none.
    """
    registry = _load()
    if name not in registry:
        raise UserError(f"unknown problem family {name!r}; known: {', '.join(sorted(registry))}")
    return registry[name]


def generate(
    name: str,
    seed: int | str,
    size: int,
    *,
    level: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Problem:
    """Writes the problem that `seed` determines.

    `size` is the number of steps (at least 1), `level` 1 to 3 the size of the numbers (None: drawn).
    `overrides` changes given facts by name and nothing else.
    """
    if size < 1 or level not in (None, 1, 2, 3):
        raise ValueError(f"size must be at least 1 and level 1, 2 or 3, got size={size} level={level}")
    # A string seed goes through SHA-512, so it gives the same stream in every process and Python version.
    rng = random.Random(f"{name}/{seed}")
    level = rng.randint(1, 3) if level is None else level
    script = Script(name, overrides or {})
    get(name).write(script, rng, size, level)
    return script.finish()


def problem_of_length(
    name: str,
    seed: int | str,
    min_tokens: int,
    count: Callable[[Problem], int],
    *,
    level: int | None = None,
) -> Problem:
    """A problem of at least `min_tokens` tokens by `count`, overshooting by a step or two.

    Length grows about linearly with the number of steps; a secant through two samples gives the size and
    single steps correct what randomness leaves.
    """
    small, large = 4, 16
    tokens_small = count(generate(name, seed, small, level=level))
    if tokens_small >= min_tokens:
        return _smallest(name, seed, range(1, small + 1), min_tokens, count, level)
    tokens_large = count(generate(name, seed, large, level=level))
    per_step = max(1.0, (tokens_large - tokens_small) / (large - small))
    least = per_step / 2
    size = max(small, round(small + (min_tokens - tokens_small) / per_step))
    best: Problem | None = None
    tried: dict[int, int] = {}
    # Wording varies with the size, so the length is not quite monotone: a few corrections, then the best.
    while best is None or (len(tried) < 8 and size not in tried):
        problem = generate(name, seed, size, level=level)
        tokens = tried[size] = count(problem)
        if size > small:
            per_step = max(least, (tokens - tokens_small) / (size - small))
        surplus = tokens - min_tokens
        if surplus >= 0 and tokens == min(n for n in tried.values() if n >= min_tokens):
            best = problem
        if 0 <= surplus <= 1.5 * per_step:
            break
        size -= max(1, int(surplus / per_step)) if surplus > 0 else -max(1, int(-surplus / per_step))
    assert best is not None
    return best


def _smallest(
    name: str,
    seed: int | str,
    sizes: Sequence[int],
    min_tokens: int,
    count: Callable[[Problem], int],
    level: int | None,
) -> Problem:
    for size in sizes:
        problem = generate(name, seed, size, level=level)
        if count(problem) >= min_tokens:
            return problem
    raise AssertionError("the largest size was long enough before")
