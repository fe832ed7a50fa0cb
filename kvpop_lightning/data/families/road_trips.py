"""Held out: a table of road lengths and tolls, and a long round trip that looks every leg up."""

from __future__ import annotations

import random

from kvpop_lightning.data.families import family
from kvpop_lightning.data.families.wording import NAMES, TOWNS, manner
from kvpop_lightning.data.problem import Script

_OPENINGS = (
    "The roads of a county, with length in miles and toll in cents: {roads}. {who} drives this route: "
    "{route}. How many miles is the route, and how much toll is paid in all? Give miles plus cents as one "
    "number.",
    "{who} reads from the road map (miles, cents of toll): {roads}. The journey passes {route}. Add up the "
    "miles and the tolls; the answer is the sum of both totals.",
)
_STEPS = (
    "Leg {i}: from {a} to {b}. The road {a}-{b} has {miles} miles and a toll of {toll} cents. Miles: {m}. "
    "Toll: {t}.",
    "{who} goes on from {a} to {b}, which the map gives as {miles} miles and {toll} cents. That makes {m} "
    "miles and {t} cents so far.",
    "Between {a} and {b} there are {miles} miles ({toll} cents). Total distance {m}; total toll {t}.",
)


@family("road_trips", "a table of road lengths and tolls; a long route looks every leg up", held_out=True)
def write(script: Script, rng: random.Random, size: int, level: int) -> None:
    who = rng.choice(NAMES)
    towns = rng.sample(TOWNS, min(9, 6 + size // 12))
    ring = [(a, b) for a, b in zip(towns, [*towns[1:], towns[0]], strict=True)]
    extra = [(a, b) for i, a in enumerate(towns) for b in towns[i + 2 :] if (b, a) not in ring]
    roads = ring + rng.sample(extra, min(len(extra), 3 + level))
    for a, b in roads:
        script.draw(f"miles {a}-{b}", rng, range(11, (60, 99, 250)[level - 1]))
        script.draw(f"toll {a}-{b}", rng, range(5, 95))
    by_town: dict[str, list[tuple[str, tuple[str, str]]]] = {town: [] for town in towns}
    for a, b in roads:
        by_town[a].append((b, (a, b)))
        by_town[b].append((a, (a, b)))
    here, legs, visits = rng.choice(towns), [], dict.fromkeys(roads, 0)
    for _ in range(size):
        # The least travelled road next: a road comes back only after most of the map was driven.
        options = by_town[here]
        least = min(visits[road] for _, road in options)
        there, road = rng.choice([option for option in options if visits[option[1]] == least])
        visits[road] += 1
        legs.append((here, there, road))
        here = there
    table = ", ".join(
        f"{a}-{b} {script.fact(f'miles {a}-{b}')} and {script.fact(f'toll {a}-{b}')}"
        for a, b in sorted(roads)
    )
    route = ", ".join([legs[0][0], *(b for _, b, _ in legs)])
    script.ask(rng.choice(_OPENINGS).format(who=who, roads=table, route=route))
    styles, miles, toll = manner(rng, _STEPS), "", ""
    for i, (a, b, (p, q)) in enumerate(legs, 1):
        length, cost = f"miles {p}-{q}", f"toll {p}-{q}"
        m = script.equation(f"{script.use(miles) if miles else 0} + {script.use(length)}", f"miles after {i}")
        t = script.equation(f"{script.use(toll) if toll else 0} + {script.use(cost)}", f"toll after {i}")
        miles, toll = f"miles after {i}", f"toll after {i}"
        script.say(
            rng.choice(styles).format(
                i=i, a=a, b=b, who=who, miles=script.use(length), toll=script.use(cost), m=m, t=t
            )
        )
    answer = script.equation(f"{script.use(miles)} + {script.use(toll)}", "answer")
    script.say(f"The answer is {answer}.")
    values = script.values
    script.conclude(
        values["answer"], sum(values[f"miles {p}-{q}"] + values[f"toll {p}-{q}"] for _, _, (p, q) in legs)
    )
