"""`--help`: commands, and the settings a command commonly takes, straight from the schema."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from kvpop_lightning.commands import COMMANDS, Command, load_command
from kvpop_lightning.config.choices import CHOICES
from kvpop_lightning.config.compose import OWN_KEYS
from kvpop_lightning.config.describe import settings, top_groups
from kvpop_lightning.config.files import names

WIDTH = 100


def overview() -> str:
    """`kvpop --help`."""
    lines = [
        "kvpop: retrofit a language model with a bounded KV cache, train what it evicts, compare and run it",
        "",
        "usage: kvpop COMMAND [key=value ...] [--help] [--print-config]",
        "",
        *(f"  {name:<10}{load_command(name).SUMMARY}" for name in COMMANDS),
        "",
        "kvpop COMMAND --help lists the command's settings. experiment=NAME picks a file of "
        "configs/experiment/,",
        "policy=NAME one of configs/policy/, and so on; policy.budget.topk=188 sets one value.",
    ]
    return "\n".join(lines)


def of_command(name: str, command: Command) -> str:
    """`kvpop NAME --help`."""
    lines = [
        f"kvpop {name}: {command.SUMMARY}",
        "",
        f"usage: kvpop {name}{_own_words(command)} [key=value ...] [--print-config]",
        "",
    ]
    for paragraph in textwrap.dedent(command.DETAILS).strip().split("\n\n"):
        lines += [textwrap.fill(" ".join(paragraph.split()), WIDTH), ""]
    if command.DEFAULT_EXPERIMENT:
        lines += [f"Without experiment=... it takes experiment={command.DEFAULT_EXPERIMENT}.", ""]
    lines.append("Files to choose from:")
    for group in ("experiment", *top_groups()):
        if group_names := names(group):
            lines += _wrapped(f"  {group + '=':<12}", " ".join(group_names))
    lines += ["", "Common settings (type, default of the schema):"]
    for key in command.KEYS:
        setting = settings()[key]
        shown = key.removeprefix(f"{OWN_KEYS.get(name)}.")
        lines.append(f"  {shown}  {setting.expected}, {_default(setting.default)}")
        if setting.doc:
            lines += _wrapped("      ", setting.doc.replace("`", ""))
        if key in CHOICES and not all(choice in setting.doc for choice in CHOICES[key]):
            lines += _wrapped("      ", f"Choices: {' '.join(CHOICES[key])}")
    lines += [
        "",
        f"All settings with their values: kvpop {name} --print-config; what they mean: "
        "kvpop_lightning/config/schema.py",
    ]
    return "\n".join(lines)


def _own_words(command: Command) -> str:
    """` NAME [--worker]` for a command that takes a bare word and flags."""
    argument: str | None = getattr(command, "ARGUMENT", None)
    word = f" {argument.rpartition('.')[2].upper()}" if argument else ""
    return word + "".join(f" [{flag}]" for flag in getattr(command, "FLAGS", {}))


def _default(value: Any) -> str:
    return json.dumps(value)


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
    )
