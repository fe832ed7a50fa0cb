"""Short problems from reasoning-gym, with a worked form of our own where steps say more than the answer
alone.

They fill what longer documents leave of a row. Every worked form ends in reasoning-gym's own answer, checked
here.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from kvpop_lightning.data.problem import Problem, evaluate

FAMILY = "reasoning_gym"
TASKS = (
    "basic_arithmetic",
    "calendar_arithmetic",
    "chain_sum",
    "count_bits",
    "family_relationships",
    "fraction_simplification",
    "gcd",
    "gsm_symbolic",
    "lcm",
    "leg_counting",
    "prime_factorization",
    "products",
    "simple_equations",
    "syllogism",
    "time_intervals",
)


# Requests for a bare answer contradict a worked one.
_BARE = re.compile(
    r"\s*(Give|Reply with|Respond with|Only give|Respond only with|State)( only| just)?[^.?\n]*\.\s*$"
)


def package_version() -> str:
    """Version of reasoning-gym, part of the data fingerprint."""
    return version("reasoning-gym")


def short_problem(seed: int | str) -> Problem:
    """The short problem that `seed` determines."""
    rng = random.Random(f"{FAMILY}/{seed}")
    task = rng.choice(TASKS)
    entry = _entry(task, rng.randrange(2**31))
    answer = str(entry["answer"])
    steps = _WORKED.get(task, _no_steps)(entry["metadata"], answer)
    solution = f"{steps}\n\nThe answer is {answer}." if steps else f"The answer is {answer}."
    return Problem(f"{FAMILY}/{task}", _BARE.sub("", entry["question"]).strip(), solution, answer)


def _entry(task: str, seed: int) -> dict[str, Any]:
    import reasoning_gym  # 3 s of import, so only when a short problem is wanted

    entry: dict[str, Any] = reasoning_gym.create_dataset(task, size=1, seed=seed)[0]
    return entry


def _no_steps(metadata: dict[str, Any], answer: str) -> str:
    return ""


def _euclid(a: int, b: int) -> tuple[list[str], int]:
    lines = []
    while b:
        lines.append(f"{a} mod {b} = {evaluate(f'{a} mod {b}')}.")
        a, b = b, a % b
    return lines, a


def _gcd(metadata: dict[str, Any], answer: str) -> str:
    numbers = [int(n) for n in metadata["numbers"]]
    lines, current = ["We use the Euclidean algorithm."], numbers[0]
    for number in numbers[1:]:
        steps, divisor = _euclid(max(current, number), min(current, number))
        lines += [*steps, f"So the gcd of {current} and {number} is {divisor}."]
        current = divisor
    assert str(current) == answer
    return " ".join(lines)


def _lcm(metadata: dict[str, Any], answer: str) -> str:
    numbers = [int(n) for n in metadata["numbers"]]
    lines, current = [], numbers[0]
    for number in numbers[1:]:
        steps, divisor = _euclid(max(current, number), min(current, number))
        lines += [*steps, f"The gcd of {current} and {number} is {divisor}."]
        multiple = math.lcm(current, number)
        assert evaluate(f"{current} × {number} ÷ {divisor}") == multiple
        lines.append(f"The lcm is {current} × {number} ÷ {divisor} = {multiple}.")
        current = multiple
    assert str(current) == answer
    return " ".join(lines)


def _factors(metadata: dict[str, Any], answer: str) -> str:
    number, rest, lines, divisor = int(metadata["number"]), int(metadata["number"]), [], 2
    factors = []
    while divisor * divisor <= rest:
        if rest % divisor == 0:
            lines.append(f"{rest} ÷ {divisor} = {evaluate(f'{rest} ÷ {divisor}')}.")
            factors.append(divisor)
            rest //= divisor
        else:
            divisor += 1
    if rest > 1:
        factors.append(rest)
        lines.append(f"{rest} is prime.")
    assert " × ".join(map(str, factors)) == answer
    assert math.prod(factors) == number
    return " ".join(["We divide by small primes.", *lines])


def _product(metadata: dict[str, Any], answer: str) -> str:
    expression = str(metadata["expression"]).replace("*", "×")
    parts = expression.split(" × ")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return ""
    a, b = (int(part) for part in parts)
    lines, total = [f"Split {b} by its digits."], 0
    for place, digit in enumerate(reversed(str(b))):
        part = int(digit) * 10**place
        partial = evaluate(f"{a} × {part}")
        lines.append(f"{a} × {part} = {partial}; {total} + {partial} = {total + partial}.")
        total += partial
    assert str(total) == answer
    return " ".join(lines)


def _chain(metadata: dict[str, Any], answer: str) -> str:
    tokens = str(metadata["expression"]).split()
    if len(tokens) < 3 or any(sign not in "+-" for sign in tokens[1::2]):
        return ""
    total, lines = int(tokens[0]), []
    for sign, number in zip(tokens[1::2], tokens[2::2], strict=True):
        value = evaluate(f"{total} {sign} {number}")
        lines.append(f"{total} {sign} {number} = {value}.")
        total = value
    assert str(total) == answer
    return " ".join(["From left to right:", *lines])


_WORKED: dict[str, Callable[[dict[str, Any], str], str]] = {
    "gcd": _gcd,
    "lcm": _lcm,
    "prime_factorization": _factors,
    "products": _product,
    "chain_sum": _chain,
}
