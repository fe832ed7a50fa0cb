"""Held out: ships with fixed voyage lengths sail one after the other; dates are carried over month ends."""

from __future__ import annotations

import datetime
import random

from kvpop_lightning.data.families import family
from kvpop_lightning.data.families.wording import MONTH_DAYS, MONTHS, SHIPS, manner
from kvpop_lightning.data.problem import Script

_OPENINGS = (
    "Voyages in days, by ship: {ships}. A parcel leaves on {start} {month} and is carried by these ships, "
    "each leaving on the day the one before arrives: {plan}. On which date does it arrive? Every February "
    "has 28 days.",
    "A chain of ships carries mail. The ships need {ships} days each. The mail sets off on {start} {month}; "
    "the ships follow one another in the order {plan}. Find the date of arrival (February always has 28 "
    "days).",
)
_STEPS = (
    "Leg {i}: the {ship} leaves on {day} {month}. The {ship} needs {days} days: {sum}. {carry}",
    "The {ship} takes over on {day} {month}; its voyage lasts {days} days, and {sum}. {carry}",
    "On {day} {month} the {ship} sails. We were told that the {ship} takes {days} days, so {sum}. {carry}",
)


@family("date_chain", "fixed voyage lengths by ship; dates carried over month ends", held_out=True)
def write(script: Script, rng: random.Random, size: int, level: int) -> None:
    ships = rng.sample(SHIPS, min(len(SHIPS), 7 + size // 12))
    for ship in ships:
        script.draw(f"days of {ship}", rng, range(3, 28))
    month = rng.randrange(12)
    script.draw("day 0", rng, range(1, 29))
    plan: list[str] = []
    while len(plan) < size:
        plan += rng.sample(ships, len(ships))
    plan = plan[:size]
    script.ask(
        rng.choice(_OPENINGS).format(
            ships=", ".join(f"{ship} {script.fact(f'days of {ship}')}" for ship in sorted(ships)),
            start=script.fact("day 0"),
            month=MONTHS[month],
            plan=", ".join(plan),
        )
    )
    # The direct computation counts days in a year without a leap day (2001).
    ordinal = sum(MONTH_DAYS[:month]) + script.values["day 0"] - 1
    styles = manner(rng, _STEPS)
    for i, ship in enumerate(plan, 1):
        day, length = f"day {i - 1}", MONTH_DAYS[month]
        total = script.equation(f"{script.use(day)} + {script.use(f'days of {ship}')}", f"sum {i}")
        sailing = {"day": script.use(day), "month": MONTHS[month], "days": script.use(f"days of {ship}")}
        if script.values[f"sum {i}"] > length:
            left = script.equation(f"{script.use(f'sum {i}')} - {length}", f"day {i}")
            following = (month + 1) % 12
            carry = f"{MONTHS[month]} has {length} days, so {left}: it arrives on {script.use(f'day {i}')} "
            month = following
            carry += f"{MONTHS[month]}."
        else:
            script.derive(f"day {i}", script.values[f"sum {i}"])
            carry = f"It arrives on {script.fact(f'day {i}')} {MONTHS[month]}."
        script.say(rng.choice(styles).format(sum=total, i=i, ship=ship, carry=carry, **sailing))
        ordinal += script.values[f"days of {ship}"]
    script.say(f"The arrival is on {script.use(f'day {size}')} {MONTHS[month]}.")
    expected = datetime.date(2001, 1, 1) + datetime.timedelta(days=ordinal % 365)
    script.conclude(
        f"{script.values[f'day {size}']} {MONTHS[month]}", f"{expected.day} {MONTHS[expected.month - 1]}"
    )
