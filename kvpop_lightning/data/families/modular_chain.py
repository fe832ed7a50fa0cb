"""A chain x -> a x + b mod p; the residue of x plus the step number chooses the rule, so only the rules are
listed.

The step number keeps the chain from running into a short cycle, whose text would repeat word for word.
"""

from __future__ import annotations

import random

from kvpop_lightning.data.families import family
from kvpop_lightning.data.families.wording import manner
from kvpop_lightning.data.problem import Script

_OPENINGS = (
    "Start from x = {start} and apply {size} steps. In step i let r be the remainder of x + i after "
    "division by {n} and use the rule numbered r: {rules}. After each rule, reduce modulo {p}. Which number "
    "results?",
    "A sequence of numbers modulo {p} begins with x = {start}. The term number i follows from the one "
    "before by a rule that depends on r = (x + i) mod {n}: {rules}. Compute the term reached after {size} "
    "steps.",
    "Rules for a game with numbers modulo {p}: {rules}. The rule to use in round i is given by (x + i) mod "
    "{n}. Beginning with x = {start}, play {size} rounds and state the last number.",
)
_RULES = (
    "rule {r} multiplies by {a} and adds {b}",
    "rule {r}: times {a}, plus {b}",
    "rule {r} sends x to {a} × x + {b}",
)
_STEPS = (
    "Step {i}: x is {x}. {which}, so rule {r} applies. Rule {r} multiplies by {a} and adds {b}: {raw}. "
    "{next}.",
    "{i}) With x = {x} we get {which}. Look up rule {r}: the factor is {a} and the constant is {b}. Thus "
    "{raw}, and {next}.",
    "Round {i}. The current number is {x}; {which} selects rule {r}, which has factor {a} and constant {b}. "
    "We compute {raw}. Then {next}.",
    "{i}. Now x = {x}, and because {which}, the rule numbered {r} is used, times {a} plus {b}. This gives "
    "{raw}; reduced, {next}.",
)


@family("modular_chain", "the residue of the current number selects one of several stated rules")
def write(script: Script, rng: random.Random, size: int, level: int) -> None:
    p = script.draw("p", rng, (97, 101, 103, 107, 109, 113, 127) if level < 3 else (401, 409, 419, 421, 431))
    n = min(12, 6 + size // 12)
    factors = rng.sample(range(2, 40), n)
    for r in range(n):
        script.draw(f"factor {r}", rng, (factors[r], factors[r] + 40, factors[r] + 41))
        script.draw(f"constant {r}", rng, range(3, 90))
    start = script.draw("start", rng, range(5, 97))
    shape = rng.choice(_RULES)
    rules = "; ".join(
        shape.format(r=r, a=script.fact(f"factor {r}"), b=script.fact(f"constant {r}")) for r in range(n)
    )
    script.ask(
        rng.choice(_OPENINGS).format(
            start=script.fact("start"), size=size, n=n, rules=rules, p=script.fact("p")
        )
    )
    styles, current, x = manner(rng, _STEPS), "start", start
    for i in range(1, size + 1):
        r = (script.values[current] + i) % n
        which = script.equation(f"({script.use(current)} + {i}) mod {n}")
        a, b = script.use(f"factor {r}"), script.use(f"constant {r}")
        raw = script.equation(f"{a} × {script.use(current)} + {b}", f"raw {i}")
        following = script.equation(f"{script.use(f'raw {i}')} mod {script.use('p')}", f"x {i}")
        script.say(
            rng.choice(styles).format(
                i=i, x=script.use(current), which=which, r=r, a=a, b=b, raw=raw, next=following
            )
        )
        current = f"x {i}"
        x = (script.values[f"factor {(x + i) % n}"] * x + script.values[f"constant {(x + i) % n}"]) % p
    script.say(f"After {size} steps the number is {script.use(current)}.")
    script.conclude(script.values[current], x)
