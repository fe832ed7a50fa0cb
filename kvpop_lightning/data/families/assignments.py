"""A straight-line program: named constants first, then assignments that look earlier variables up."""

from __future__ import annotations

import random

from kvpop_lightning.data.families import family
from kvpop_lightning.data.families.wording import VARIABLES, manner
from kvpop_lightning.data.problem import Script

_OPENINGS = (
    "A small program starts with these constants: {constants}. All arithmetic is done modulo {modulus}. It "
    "then runs the following lines: {program}. What is the value of {last} at the end?",
    "Consider the variables {constants}. The lines below are executed from left to right, and each result "
    "is reduced modulo {modulus}: {program}. Determine {last}.",
    "Let {constants}. Working modulo {modulus}, evaluate step by step: {program}. Report the final value of "
    "{last}.",
)
_STEPS = (
    "Line {i}: {target} = {left} {op} {right}. We have {left} = {a} and {right} = {b}, so {raw}, and "
    "{reduced}. Hence {target} is {value}.",
    "To get {target} we look up {left}, which is {a}, and {right}, which is {b}. Then {raw}; modulo the "
    "modulus this is {reduced}. So {target} = {value}.",
    "{target}: recall that {left} has the value {a} and {right} the value {b}. {raw}. {reduced}. Store "
    "{target} = {value}.",
    "Step {i} assigns {target}. Since {left} is {a} and {right} is {b}, the result is {raw}, which reduces "
    "to {reduced}, that is {target} = {value}.",
)


@family("assignments", "named constants, then a chain of assignments that look earlier variables up")
def write(script: Script, rng: random.Random, size: int, level: int) -> None:
    modulus = script.draw(
        "modulus", rng, (97, 101, 103, 107, 109, 113) if level < 3 else (499, 503, 509, 521, 523)
    )
    constants = rng.sample(VARIABLES, min(12, 6 + size // 10))
    for name in constants:
        script.draw(name, rng, range(11, 97))
    # Results are named so that two documents share no long name; a result is read again by the next line (so
    # every fact reaches the answer) together with a constant or an old result.
    prefix = rng.choice("tuvxyz")
    lines: list[tuple[str, str, str, str]] = []
    rng.shuffle(constants)
    for i in range(1, size + 1):
        previous = f"{prefix}{i - 1}" if i > 1 else constants[-1]
        old_results = [f"{prefix}{j}" for j in range(1, i - 6)]
        other = constants[(i - 1) % len(constants)]
        if old_results and rng.random() < 0.35:
            other = rng.choice(old_results)
        left, right = (previous, other) if rng.random() < 0.5 else (other, previous)
        lines.append((f"{prefix}{i}", left, rng.choice(("+", "-", "+", "×")), right))
    script.ask(
        rng.choice(_OPENINGS).format(
            constants=", ".join(f"{name} = {script.fact(name)}" for name in sorted(constants)),
            modulus=script.fact("modulus"),
            program="; ".join(f"{target} = {left} {op} {right}" for target, left, op, right in lines),
            last=lines[-1][0],
        )
    )
    styles = manner(rng, _STEPS)
    memory = {name: script.values[name] for name in constants}
    for i, (target, left, op, right) in enumerate(lines, 1):
        a, b = script.use(left), script.use(right)
        raw = script.equation(f"{a} {op} {b}", f"raw {i}")
        reduced = script.equation(f"{script.use(f'raw {i}')} mod {script.use('modulus')}", f"reduced {i}")
        script.derive(target, script.values[f"reduced {i}"])
        script.say(
            rng.choice(styles).format(
                i=i, target=target, left=left, right=right, op=op, a=a, b=b, raw=raw, reduced=reduced,
                value=script.fact(target),
            )
        )  # fmt: skip
        x, y = memory[left], memory[right]
        memory[target] = {"+": x + y, "-": x - y, "×": x * y}[op] % modulus
    last = lines[-1][0]
    script.say(f"The final value of {last} is {script.use(last)}.")
    script.conclude(script.values[last], memory[last])
