"""Long multiplication digit by digit; every row goes back to all digits of the first factor."""

from __future__ import annotations

import random

from kvpop_lightning.data.families import family
from kvpop_lightning.data.problem import Script

_OPENINGS = (
    "Multiply {a} by {b} with the schoolbook method and show every digit.",
    "Compute the product {a} × {b} by long multiplication, writing down all carries.",
    "What is {a} × {b}? Work through it row by row.",
)
_ROWS = (
    "Row {r}: multiply by the digit {d} of the second factor, shifted by {shift} places.",
    "The digit at place {r} of the second factor is {d}, so this row is shifted by {shift}.",
)
_CELLS = (
    "Digit {x} times {d}: {eq}; write {w}, carry {c}.",
    "The next digit of the first factor is {x}: {eq}, so we write {w} and carry {c}.",
    "Take {x}: {eq}, that is {w} with carry {c}.",
)


@family("long_multiplication", "schoolbook multiplication with all carries; rows return to the same digits")
def write(script: Script, rng: random.Random, size: int, level: int) -> None:
    width = 3 + level
    rows = max(2, -(-2 * size // width))
    names_a = [f"a{k}" for k in range(width)]  # place 0 is the last digit
    names_b = [f"b{k}" for k in range(rows)]
    for name in names_a:
        script.draw(name, rng, range(1, 10))
    for name in names_b:
        script.draw(name, rng, range(2, 10))
    factor_a = "".join(script.fact(name) for name in reversed(names_a))
    factor_b = "".join(script.fact(name) for name in reversed(names_b))
    script.ask(rng.choice(_OPENINGS).format(a=factor_a, b=factor_b))
    value_a = sum(script.values[name] * 10**k for k, name in enumerate(names_a))
    value_b = sum(script.values[name] * 10**k for k, name in enumerate(names_b))
    script.say("We go through the second factor from its last digit to its first.")
    row_style, cell_style = rng.choice(_ROWS), rng.choice(_CELLS)
    running = None
    for r, b in enumerate(names_b):
        lines = [row_style.format(r=r + 1, d=script.use(b), shift=r)]
        carry, digits = "0", []
        for k, a in enumerate(names_a):
            key = f"{r}.{k}"
            eq = script.equation(f"{script.use(a)} × {script.use(b)} + {carry}")
            cell = script.values[a] * script.values[b] + (script.values[f"carry {r}.{k - 1}"] if k else 0)
            script.derive(f"digit {key}", cell % 10)
            script.derive(f"carry {key}", cell // 10)
            digits.append(f"digit {key}")
            lines.append(
                cell_style.format(
                    x=script.use(a),
                    d=script.use(b),
                    eq=eq,
                    w=script.fact(f"digit {key}"),
                    c=script.fact(f"carry {key}"),
                )
            )
            carry = script.use(f"carry {key}")
        row_value = script.values[b] * value_a
        leading = carry if script.values[f"carry {r}.{width - 1}"] else ""
        shown = leading + "".join(script.use(name) for name in reversed(digits))
        script.derive(f"row {r}", row_value * 10**r)
        lines.append(f"The row reads {shown}, with the shift {script.fact(f'row {r}')}.")
        if running is None:
            running = f"row {r}"
        else:
            added = script.equation(script.use(running) + " + " + script.use(f"row {r}"), f"sum {r}")
            lines.append(f"Sum so far: {added}.")
            running = f"sum {r}"
        script.say(" ".join(lines))
    assert running is not None
    script.say(f"The product is {script.use(running)}.")
    script.conclude(script.values[running], value_a * value_b)
