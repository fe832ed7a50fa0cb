"""Made-up units linked by stated rates; amounts in many units are converted link by link and added up."""

from __future__ import annotations

import random

from kvpop_lightning.data.families import family
from kvpop_lightning.data.families.wording import NAMES, UNITS, manner, singular
from kvpop_lightning.data.problem import Script

_OPENINGS = (
    "In an old kingdom the units of weight are linked like this: {rates}. {who} delivers {amounts}. How "
    "many {base} is that in total?",
    "Conversion table: {rates}. A caravan led by {who} carries these loads one after the other: {amounts}. "
    "Express the sum in {base}.",
    "{who} has a table of units: {rates}. Convert every entry of the list {amounts} to {base} and add "
    "everything up.",
)
_STEPS = (
    "Entry {i}: {amount} {unit}. {links} Running total: {total} {base}.",
    "{i}) We convert {amount} {unit}. {links} The sum grows to {total}.",
    "Now {amount} {unit}. {links} Adding this gives {total} {base} so far.",
)
_LINKS = (
    "One {one} is {rate} {to}, so {eq} {to}.",
    "By the table 1 {one} = {rate} {to}: {eq} {to}.",
    "Since each {one} makes {rate} {to}, we have {eq} {to}.",
)


@family("unit_chain", "a table of made-up units; amounts are converted link by link and added up")
def write(script: Script, rng: random.Random, size: int, level: int) -> None:
    who = rng.choice(NAMES)
    units = rng.sample(UNITS, min(14, 7 + size // 6))
    base, roots = units[0], {units[0]: 0}
    parent: dict[str, str] = {}
    for unit in units[1:]:
        parent[unit] = rng.choice([u for u, depth in roots.items() if depth < 2 + (level > 1)])
        roots[unit] = roots[parent[unit]] + 1
        script.draw(f"rate {unit}", rng, range(2, (9, 15, 30)[level - 1]))
    others = units[1:]
    entries = []
    for i in range(1, size + 1):
        if (i - 1) % len(others) == 0:
            rng.shuffle(others)
        script.draw(f"amount {i}", rng, range(2, 40))
        entries.append((i, others[(i - 1) % len(others)]))
    rates = [f"1 {singular(u)} = {script.fact(f'rate {u}')} {parent[u]}" for u in units[1:]]
    rng.shuffle(rates)
    amounts = ", ".join(f"{script.fact(f'amount {i}')} {unit}" for i, unit in entries)
    script.ask(rng.choice(_OPENINGS).format(rates=", ".join(rates), who=who, amounts=amounts, base=base))
    styles, links, total, expected = manner(rng, _STEPS), manner(rng, _LINKS), None, 0
    for i, unit in entries:
        name, current, steps, factor = f"amount {i}", unit, [], 1
        while current != base:
            eq = script.equation(
                f"{script.use(name)} × {script.use(f'rate {current}')}", f"{i} in {parent[current]}"
            )
            steps.append(
                rng.choice(links).format(
                    one=singular(current), rate=script.use(f"rate {current}"), to=parent[current], eq=eq
                )
            )
            factor *= script.values[f"rate {current}"]
            current = parent[current]
            name = f"{i} in {current}"
        if total is None:
            script.derive(f"total {i}", script.values[name])
            running = script.fact(f"total {i}")
        else:
            running = script.equation(f"{script.use(total)} + {script.use(name)}", f"total {i}")
        script.say(
            rng.choice(styles).format(
                i=i,
                amount=script.use(f"amount {i}"),
                unit=unit,
                links=" ".join(steps),
                total=running,
                base=base,
            )
        )
        total = f"total {i}"
        expected += script.values[f"amount {i}"] * factor
    assert total is not None
    script.say(f"Altogether this is {script.use(total)} {base}.")
    script.conclude(script.values[total], expected)
