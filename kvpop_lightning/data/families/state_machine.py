"""A machine with named states: the rule for (state, symbol) gives the next state and points."""

from __future__ import annotations

import random

from kvpop_lightning.data.families import family
from kvpop_lightning.data.families.wording import PLACES, manner
from kvpop_lightning.data.problem import Script

_OPENINGS = (
    "A token moves between places. {rules} It starts at the {start} with {points} points, and the symbols "
    "{word} are read over and over again. How many points are there after {size} moves?",
    "Consider a machine whose states are places. {rules} The input repeats the word {word}. The machine "
    "starts in the {start} with {points} points. Count the points after {size} steps.",
    "{rules} These are the rules of a walk. Begin at the {start} holding {points} points and follow the "
    "repeated word {word} for {size} moves. What is the final score?",
)
_RULES = (
    "From the {a} the symbol {s} leads to the {b} and gives {p} points.",
    "{a}, {s}: go to the {b}, add {p}.",
    "At the {a}, on {s}, move to the {b} for {p} points.",
)
_STEPS = (
    "Move {i}: we are at the {a} and read {s}. The rule for the {a} and {s} leads to the {b} and gives {p} "
    "points, so the score is {score}.",
    "{i}. State {a}, symbol {s}: go to the {b}, add {p}. Score: {score}.",
    "Symbol {s} at the {a}. According to the rules this means moving to the {b} for {p} points; {score}.",
    "Reading {s} while at the {a}, we pass to the {b} and collect {p} points, which makes {score} after "
    "move {i}.",
)


@family("state_machine", "a transition table stated first, a walk that looks a rule up at every move")
def write(script: Script, rng: random.Random, size: int, level: int) -> None:
    symbols = "abcd"[: 2 + (level > 1)]
    states = rng.sample(PLACES, min(7, 4 + size // 25))
    word = "".join(rng.choice(symbols) for _ in range(rng.choice((5, 7))))
    rules = []
    shape = rng.choice(_RULES)
    # A symbol moves every state by the same number of places along a hidden circle: the walk then visits the
    # whole machine and no two rules share their target, as long as no rule is changed.
    shifts = dict(zip(symbols, rng.sample(range(1, len(states)), len(symbols)), strict=True))
    for index, a in enumerate(states):
        for s in symbols:
            target = states[(index + shifts[s]) % len(states)]
            script.draw(
                f"{a} {s} to", rng, [target], alternative=states[(index + shifts[s] + 1) % len(states)]
            )
            script.draw(f"{a} {s} points", rng, range(2, (20, 60, 200)[level - 1]))
            rules.append(
                shape.format(a=a, s=s, b=script.fact(f"{a} {s} to"), p=script.fact(f"{a} {s} points"))
            )
    rng.shuffle(rules)
    start = rng.choice(states)
    script.draw("points", rng, range(10, 99))
    script.ask(
        rng.choice(_OPENINGS).format(
            rules=" ".join(rules), start=start, points=script.fact("points"), word=word, size=size
        )
    )
    styles, state, score = manner(rng, _STEPS), start, "points"
    for i in range(1, size + 1):
        s = word[(i - 1) % len(word)]
        rule = f"{state} {s}"
        eq = script.equation(f"{script.use(score)} + {script.use(f'{rule} points')}", f"score {i}")
        script.say(
            rng.choice(styles).format(
                i=i, a=state, s=s, b=script.use(f"{rule} to"), p=script.use(f"{rule} points"), score=eq
            )
        )
        state, score = script.values[f"{rule} to"], f"score {i}"
    script.say(f"The final score is {script.use(score)}.")
    script.conclude(script.values[score], _play(script.values, start, word, size))


def _play(values: dict[str, int], start: str, word: str, size: int) -> int:
    state, points = start, values["points"]
    for i in range(size):
        key = f"{state} {word[i % len(word)]}"
        state, points = str(values[f"{key} to"]), points + values[f"{key} points"]
    return points
