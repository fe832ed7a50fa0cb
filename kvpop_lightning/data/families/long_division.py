"""Long division; a table of multiples of the divisor is made first and looked up at every digit."""

from __future__ import annotations

import random

from kvpop_lightning.data.families import family
from kvpop_lightning.data.families.wording import manner
from kvpop_lightning.data.problem import Script

_OPENINGS = (
    "Divide {dividend} by {divisor} using long division. What are the quotient and the remainder?",
    "Carry out the long division {dividend} ÷ {divisor} and report quotient and remainder.",
    "Find quotient and remainder when {dividend} is divided by {divisor}.",
)
_STEPS = (
    "Bring down {digit}: we have {current}. The largest multiple in the table is {q} × {d} = {multiple}. "
    "Write {q}; {rest} is left.",
    "The next digit is {digit}, which makes {current}. From the table, {q} times the divisor is {multiple}, "
    "so the quotient gets the digit {q} and {rest} remains.",
    "Step {i}. Append {digit} to the remainder to get {current}. Among the multiples, {multiple} (number "
    "{q}) fits. Quotient digit {q}, remainder {rest}.",
)


@family("long_division", "a table of multiples made first, looked up at every digit of a long dividend")
def write(script: Script, rng: random.Random, size: int, level: int) -> None:
    divisor = script.draw("divisor", rng, range(*((13, 99), (23, 400), (103, 980))[level - 1]))
    names = [f"digit {i}" for i in range(1, size + 1)]
    for i, name in enumerate(names):
        script.draw(name, rng, range(1 if i == 0 else 0, 10))
    script.ask(
        rng.choice(_OPENINGS).format(
            dividend="".join(script.fact(n) for n in names), divisor=script.fact("divisor")
        )
    )
    table = ", ".join(
        script.equation(f"{q} × {script.use('divisor')}", f"multiple {q}") for q in range(1, 10)
    )
    script.say(f"First we note the multiples of the divisor: {table}.")
    script.derive("multiple 0", 0)
    script.say(f"The multiple number 0 is {script.fact('multiple 0')}. Now we go through the digits.")
    styles, remainder, quotient = manner(rng, _STEPS), 0, []
    for i, name in enumerate(names, 1):
        current = script.derive(f"current {i}", 10 * remainder + script.values[name])
        q = max(k for k in range(10) if script.values[f"multiple {k}"] <= current)
        shown = script.fact(f"current {i}")
        rest = script.equation(f"{script.use(f'current {i}')} - {script.use(f'multiple {q}')}", f"rest {i}")
        remainder = script.values[f"rest {i}"]
        script.derive(f"quotient {i}", q)
        text = rng.choice(styles).replace("{q}", script.fact(f"quotient {i}").replace("{", "{{"), 1)
        script.say(
            text.format(
                i=i, digit=script.use(name), current=shown, q=q, d=script.use("divisor"),
                multiple=script.use(f"multiple {q}"), rest=rest,
            )
        )  # fmt: skip
        quotient.append(f"quotient {i}")
    number = int("".join(str(script.values[name]) for name in names))
    first = next((i for i, name in enumerate(quotient) if script.values[name]), len(quotient) - 1)
    digits = "".join(script.use(name) for name in quotient[first:])
    script.say(f"The quotient is {digits} and the remainder is {script.use(f'rest {size}')}.")
    reached = int("".join(str(script.values[name]) for name in quotient))
    script.conclude(f"{reached} remainder {remainder}", f"{number // divisor} remainder {number % divisor}")
