"""Clues that define each person's amount by other people's; resolved by substitution, then summed."""

from __future__ import annotations

import random

from kvpop_lightning.data.families import family
from kvpop_lightning.data.families.wording import NAMES, WARES, manner
from kvpop_lightning.data.problem import Script

_OPENINGS = (
    "Some friends collect {things}. {clues} How many {things} do all of them have together?",
    "Read these clues about {things}. {clues} Find everyone's number and the total.",
    "{clues} Using these statements, work out how many {things} each person owns, and then the sum of all "
    "of them.",
)
_CLUES = {
    "known": ("{x} has {c} {things}.", "{x} owns exactly {c} {things}."),
    "more": (
        "{x} has {c} more {things} than {a}.",
        "If {a} got {c} more {things}, that would be the number of {x}.",
    ),
    "fewer": ("{x} has {c} fewer {things} than {a}.", "{x} is {c} {things} short of the number of {a}."),
    "both": ("{x} has as many {things} as {a} and {b} together, less {c}.",),
}
_STEPS = {
    "known": ("{x} has {v}, as stated.", "The clue for {x} is direct: {v}."),
    "more": (
        "{x} has {c} more than {a}. {a} has {va}, so {eq}. Thus {x} has {v}.",
        "For {x} it is {c} more than {a}; substituting {a} = {va} gives {eq}, so {x} = {v}.",
    ),
    "fewer": (
        "{x} has {c} fewer than {a}. {a} has {va}, so {eq}. Thus {x} has {v}.",
        "For {x} it is {c} fewer than {a}; substituting {a} = {va} gives {eq}, so {x} = {v}.",
    ),
    "both": (
        "{x} has {a} and {b} together, less {c}. {a} has {va} and {b} has {vb}, so {eq}. Thus {x} has {v}.",
        "For {x} it is {a} plus {b}, less {c}; substituting {a} = {va} and {b} = {vb} gives {eq}, "
        "so {x} = {v}.",
    ),
}
_SUMS = (
    "Add {x}, who has {v}: {eq}.",
    "{x} contributes {v}, so the running total is {eq}.",
    "With {x} ({v}) we get {eq}.",
)


@family("substitutions", "clues in mixed order, resolved by substitution and summed in the end")
def write(script: Script, rng: random.Random, size: int, level: int) -> None:
    things = rng.choice(("marbles", "stamps", "coins", "cards", "shells", *WARES[:8]))
    count = max(3, size)
    people = _people(rng, count)
    clues, kinds = [], {}
    for index, x in enumerate(people):
        kind = "known" if index < 2 else rng.choice(("more", "fewer", "both", "more"))
        high = (500, 900, 3000)[level - 1]
        script.draw(
            f"clue {x}", rng, {"known": range(150, high), "both": range(160, 260)}.get(kind, range(3, 95))
        )
        a, b = rng.sample(people[:index], 2) if index >= 2 else ("", "")
        kinds[x] = (kind, a, b)
        clues.append(
            rng.choice(_CLUES[kind]).format(x=x, a=a, b=b, c=script.fact(f"clue {x}"), things=things)
        )
    rng.shuffle(clues)
    script.ask(rng.choice(_OPENINGS).format(things=things, clues=" ".join(clues)))
    script.say("We resolve the clues one by one, starting from the people whose number is known.")
    style = rng.randrange(2)
    solved: dict[str, int] = {}
    for x in people:
        kind, a, b = kinds[x]
        c = script.use(f"clue {x}")
        va, vb = (script.use(a), script.use(b)) if a else ("", "")
        if kind == "known":
            script.derive(x, script.values[f"clue {x}"])
            script.say(_STEPS[kind][style].format(x=x, v=script.fact(x)))
            solved[x] = script.values[x]
            continue
        expression = {"more": f"{va} + {c}", "fewer": f"{va} - {c}", "both": f"{va} + {vb} - {c}"}[kind]
        eq = script.equation(expression, f"result {x}")
        script.derive(x, script.values[f"result {x}"])
        script.say(_STEPS[kind][style].format(x=x, a=a, b=b, c=c, va=va, vb=vb, eq=eq, v=script.fact(x)))
        amount = script.values[f"clue {x}"]
        solved[x] = {
            "more": solved[a] + amount,
            "fewer": solved[a] - amount,
            "both": solved[a] + solved.get(b, 0) - amount,
        }[kind]
    script.say("Now we add up everyone's number.")
    styles, running = manner(rng, _SUMS), people[0]
    script.say(f"We begin with {people[0]}, who has {script.use(people[0])}.")
    for i, x in enumerate(people[1:], 1):
        eq = script.equation(f"{script.use(running)} + {script.use(x)}", f"total {i}")
        script.say(rng.choice(styles).format(x=x, v=script.use(x), eq=eq))
        running = f"total {i}"
    script.say(f"Together they have {script.use(running)} {things}.")
    script.conclude(script.values[running], sum(solved.values()))


def _people(rng: random.Random, count: int) -> list[str]:
    """Distinct people; with more than there are first names, initials tell them apart."""
    pool = rng.sample(NAMES, len(NAMES))
    while len(pool) < count:
        initial = "ABCDEFGHKLMNPRST"[len(pool) // len(NAMES) - 1]
        pool += [f"{name} {initial}." for name in rng.sample(NAMES, len(NAMES))]
    return pool[:count]
