"""One module per command; a module imports torch and the rooms it needs only when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from kvpop_lightning.config.schema import Config

COMMANDS = (
    "prepare",
    "data",
    "train",
    "evaluate",
    "compare",
    "generate",
    "chat",
    "export",
    "bench",
    "demo",
    "sweep",
    "ablate",
    "runs",
    "doctor",
    "ui",
)


@dataclass(frozen=True)
class Call:
    """What the user typed."""

    command: str
    overrides: tuple[str, ...] = ()
    own: object = None
    """What the command's own `take_words` made of the words that are no settings."""


class Command(Protocol):
    """What a command module offers."""

    SUMMARY: str
    """One line for `kvpop --help`."""
    DETAILS: str
    """Paragraphs for the command's own help."""
    KEYS: tuple[str, ...]
    """Settings shown in the command's help, by dotted key."""
    DEFAULT_EXPERIMENT: str | None
    """Experiment when the command line names none."""
    # A command may also have `ARGUMENT`, the key whose value a word without `=` is (`kvpop sweep NAME`),
    # `FLAGS`, words with dashes and the setting each stands for (`--worker`; `--only` with "ablate.only="
    # takes the next word), and `words_before(settings)`, settings that go in front of what the user typed
    # (those of the sweep's file). A command with a language of its own has
    # `take_words(words) -> (settings, own)` instead; `own` arrives in `call.own`.

    def run(self, config: Config, call: Call) -> int:
        """Does the work; returns the exit status. Raises UserError for what the user can mend."""


def last_value(settings: Sequence[str], *keys: str) -> str | None:
    """The value that `settings` give last to one of `keys`."""
    given = [word.partition("=")[2] for word in settings if word.partition("=")[0] in keys]
    return given[-1] if given else None


def load_command(name: str) -> Command:
    """The module `kvpop_lightning.commands.<name>`."""
    return cast(Command, import_module(f"{__name__}.{name}"))
