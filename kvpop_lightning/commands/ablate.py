"""`kvpop ablate NAME`: every choice trained and measured alike, each cell compared with the default."""

from __future__ import annotations

from collections.abc import Sequence

from kvpop_lightning.commands import Call, last_value
from kvpop_lightning.config.schema import Config

SUMMARY = "compare choices (scorer, loss, target, decay) over seeds, paired"
DETAILS = """Reads sweeps/ablation_NAME.yaml (docs/ablations.md): axes of choices, a default, seeds, budgets.
    Each cell x seed is a training and a measurement in a process of its own; the cells share the features of
    a frozen base. Every cell is compared with the default on the same rows and seeds, with intervals:
    RUN_DIR/ablation.json, ablation.md, ablation.png.

    The same command goes on where it stopped: finished points are read back, and only those whose settings
    changed are run again. --only AXIS=LEVEL,LEVEL runs a part of the grid (again for another axis), --list
    shows the cells, what is finished and how long the rest should take.
    Settings of the group ablate may be written without it: workers=2."""
KEYS = (
    "ablate.only",
    "ablate.show",
    "ablate.workers",
    "ablate.gpus",
    "ablate.retries",
    "ablate.grace_s",
    "ablate.point_timeout_s",
    "ablate.memory_limit_gb",
    "ablate.threads",
    "run_dir",
)
DEFAULT_EXPERIMENT: str | None = None
ARGUMENT = "ablate.name"
FLAGS = {"--only": "ablate.only=", "--list": "ablate.show=true"}


def words_before(settings: Sequence[str]) -> list[str]:
    """What the grid's file fixes, in front of what the user typed."""
    from kvpop_lightning.sweeps.grid import words_of_grid

    name = last_value(settings, "ablate.name", "name")
    return [] if name is None else words_of_grid(name)


def run(config: Config, call: Call) -> int:
    from kvpop_lightning.sweeps.ablation import run_ablation
    from kvpop_lightning.sweeps.ablation_text import terminal_tables

    outcome = run_ablation(config, call.overrides)
    if config.ablate.show:
        return 0
    from rich.console import Console

    console = Console()
    for table in terminal_tables(outcome.table):
        console.print(table)
    print(f"{outcome.folder}/ablation.md, ablation.json" + (", ablation.png" if outcome.figure else ""))
    for line in outcome.failures:
        print(line)
    return 1 if outcome.failures else 0
