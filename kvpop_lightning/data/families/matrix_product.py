"""A small matrix stated once and applied again and again to a vector, modulo a small number."""

from __future__ import annotations

import random

from kvpop_lightning.data.families import family
from kvpop_lightning.data.families.wording import manner
from kvpop_lightning.data.problem import Script

_OPENINGS = (
    "The matrix M has the rows {rows}. Starting from the vector v = {v}, multiply by M again and again, "
    "{rounds} times, reducing every entry modulo {m}. What is the sum of the entries of the last vector?",
    "Let M be the matrix with {rows}. Compute M applied {rounds} times to the vector {v} (all entries "
    "modulo {m}) and give the sum of the entries of the result.",
    "Modulo {m}, a vector {v} is updated {rounds} times by the matrix whose rows are {rows}. Find the sum "
    "of its entries at the end.",
)
_CELLS = (
    "Row {name} of M is ({row}): {dot}, and {entry}.",
    "For entry {name} we use the row ({row}): {dot}. Reduced, {entry}.",
    "Entry {name}: the row {name} was ({row}), so {dot}; {entry}.",
)


@family("matrix_product", "a matrix stated once, applied again and again to a vector")
def write(script: Script, rng: random.Random, size: int, level: int) -> None:
    n = 3 if level == 1 else 4
    m = script.draw("m", rng, (11, 13, 17, 19) if level < 3 else (23, 29, 31, 37))
    labels = rng.choice(("ABCD", "PQRS", "UVWX"))[:n]
    rounds = max(1, -(-size // 3))
    for i in range(n):
        for j in range(n):
            script.draw(f"M {i} {j}", rng, range(1, 11))
        script.draw(f"v0 {i}", rng, range(1, 11))
    rows = ", ".join(
        f"{labels[i]} = ({', '.join(script.fact(f'M {i} {j}') for j in range(n))})" for i in range(n)
    )
    vector = f"({', '.join(script.fact(f'v0 {i}') for i in range(n))})"
    script.ask(rng.choice(_OPENINGS).format(rows=rows, v=vector, rounds=rounds, m=script.fact("m")))
    v = [script.values[f"v0 {i}"] for i in range(n)]
    styles = manner(rng, _CELLS)
    for t in range(1, rounds + 1):
        lines = [f"Round {t}: the vector is ({', '.join(script.use(f'v{t - 1} {j}') for j in range(n))})."]
        for i in range(n):
            row = ", ".join(script.use(f"M {i} {j}") for j in range(n))
            products = " + ".join(
                f"{script.use(f'M {i} {j}')} × {script.use(f'v{t - 1} {j}')}" for j in range(n)
            )
            dot = script.equation(products, f"dot {t} {i}")
            entry = script.equation(f"{script.use(f'dot {t} {i}')} mod {script.use('m')}", f"v{t} {i}")
            lines.append(rng.choice(styles).format(name=labels[i], row=row, dot=dot, entry=entry))
        script.say(" ".join(lines))
        v = [sum(script.values[f"M {i} {j}"] * v[j] for j in range(n)) % m for i in range(n)]
    total = script.equation(" + ".join(script.use(f"v{rounds} {i}") for i in range(n)), "total")
    script.say(f"The sum of the entries is {total}.")
    script.conclude(script.values["total"], sum(v))
