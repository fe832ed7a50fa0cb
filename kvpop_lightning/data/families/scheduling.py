"""Jobs with durations and prerequisites; a job starts when its last prerequisite is done."""

from __future__ import annotations

import random

from kvpop_lightning.data.families import family
from kvpop_lightning.data.families.wording import JOBS, NAMES, manner
from kvpop_lightning.data.problem import Script

_OPENINGS = (
    "{who} plans a building site. Each kind of work takes a fixed number of minutes: {durations}. The tasks "
    "and what they wait for: {tasks}. A task starts as soon as everything it waits for is done, the first "
    "ones at minute 0. When is each task done, and what is the sum of all finishing times?",
    "Minutes needed per kind of work: {durations}. {who} has this plan: {tasks}. Every task begins when the "
    "tasks named after it are finished (or at minute 0). Find all finishing times and their sum.",
)
_STEPS = (
    "{task} is {kind} and waits for {waits}. {known} It starts at minute {start}. {Kind} takes {duration} "
    "minutes, so it ends at {end}.",
    "Task {task}: {known} So {kind} can start at {start}. The duration of {kind} is {duration}: {end}.",
    "Next {task}. {known} The start is {start}, and {kind} needs {duration} minutes. It is done at {end}.",
)
_FIRST = (
    "{task} is {kind} and waits for nothing: it starts at minute 0. {Kind} takes {duration} minutes: {end}."
)


@family("scheduling", "durations by kind of work, tasks that wait for others, finishing times")
def write(script: Script, rng: random.Random, size: int, level: int) -> None:
    kinds = rng.sample(JOBS, min(12, 6 + size // 8))
    for kind in kinds:
        script.draw(f"duration of {kind}", rng, range(4, (40, 90, 300)[level - 1]))
    letter = rng.choice("ABCDEFGHKLMNPRST")
    count = max(2, size)
    tasks: list[tuple[str, str, list[str]]] = []
    for i in range(1, count + 1):
        if (i - 1) % len(kinds) == 0:
            rng.shuffle(kinds)
        earlier = [task for task, _, _ in tasks]
        waits = sorted(rng.sample(earlier, min(len(earlier), rng.choice((1, 2, 2)))), key=earlier.index)
        tasks.append((f"{letter}{i}", kinds[(i - 1) % len(kinds)], waits))
    script.ask(
        rng.choice(_OPENINGS).format(
            who=rng.choice(NAMES),
            durations=", ".join(f"{kind} {script.fact(f'duration of {kind}')}" for kind in sorted(kinds)),
            tasks="; ".join(
                f"{task} {kind}" + (f" after {' and '.join(waits)}" if waits else "")
                for task, kind, waits in tasks
            ),
        )
    )
    styles, total = manner(rng, _STEPS), None
    done: dict[str, int] = {}
    for i, (task, kind, waits) in enumerate(tasks, 1):
        duration = script.use(f"duration of {kind}")
        last = max(waits, key=lambda w: script.values[f"end {w}"], default=None)
        start = script.use(f"end {last}") if last else "0"
        end = script.equation(f"{start} + {duration}", f"end {task}")
        known = " ".join(f"{w} is done at {script.use(f'end {w}')}." for w in waits)
        shape = rng.choice(styles) if waits else _FIRST
        text = shape.format(
            task=task, kind=kind, Kind=kind.capitalize(), waits=" and ".join(waits), known=known, start=start,
            duration=duration, end=end,
        )  # fmt: skip
        if total is not None:
            added = script.equation(f"{script.use(total)} + {script.use(f'end {task}')}", f"total {i}")
            total = f"total {i}"
            text += f" Sum of finishing times: {added}."
        else:
            total = f"end {task}"
        script.say(text)
        done[task] = max((done[w] for w in waits), default=0) + script.values[f"duration of {kind}"]
    assert total is not None
    script.say(f"The sum of all finishing times is {script.use(total)}.")
    script.conclude(script.values[total], sum(done.values()))
