"""`kvpop COMMAND key=value ...`: parse, compose, run; every mistake of the user is one line and exit
status 2.

Only light modules are imported here: help and configuration errors come at once, torch loads when work
    begins.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

if find_spec("omegaconf") is None:  # even `kvpop doctor` reads its settings with it
    sys.exit(
        "error: the package omegaconf is not installed: make setup, or pip install -c constraints.txt -e ."
    )

from kvpop_lightning import __version__, help_text
from kvpop_lightning.commands import COMMANDS, Call, Command, load_command
from kvpop_lightning.config.choices import did_you_mean
from kvpop_lightning.config.compose import compose, to_yaml
from kvpop_lightning.config.folders import check_folders
from kvpop_lightning.config.own_policies import import_policies
from kvpop_lightning.disk import causes, is_disk_full, path_without_room
from kvpop_lightning.errors import ConfigError, Terminated, UserError
from kvpop_lightning.signals import sigterm_interrupts

MISTAKE, INTERRUPTED, TERMINATED = 2, 130, 143
GOES_ON = ("ablate", "compare", "data", "demo", "evaluate", "prepare", "sweep", "train")
"""Commands that, interrupted, go on from where they stopped when typed again."""
OPTIONS = ("--help", "--print-config", "--version")
PACKAGE = str(Path(__file__).resolve().parent)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0, 2 (the user can mend it), 130 (Ctrl-C), 143
    (SIGTERM)."""
    words = list(sys.argv[1:] if argv is None else argv)
    call: Call | None = None
    try:
        name, flags, settings = _split(words)
        command = load_command(name) if name is not None else None
        own = None
        if command is not None and hasattr(command, "take_words"):
            settings, own = command.take_words(settings) if "--help" not in flags else ([], None)
        else:
            settings = _settings(command, settings)
        if name is None or command is None:
            print(__version__ if "--version" in flags else help_text.overview())
            return 0
        if "--help" in flags:
            print(help_text.of_command(name, command))
            return 0
        given = [*getattr(command, "words_before", _nothing_before)(settings), *settings]
        config = compose(given, command=name, default_experiment=command.DEFAULT_EXPERIMENT)
        if "--print-config" in flags:
            print(to_yaml(config), end="")
            return 0
        check_folders(config)
        call = Call(name, tuple(settings), own)
        _set_up_process()
        _say_that_it_begins(name)
        if config.policy.module is not None:
            import_policies(config.policy.module)
        return _run(command, config, call)
    except BrokenPipeError:  # `kvpop ... | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BaseException as error:
        return _report(error, call)


def _run(command: Command, config: object, call: Call) -> int:
    """Lightning answers an interruption with `sys.exit`; what it was stands in the exception's context."""
    try:
        with sigterm_interrupts():
            return command.run(config, call)  # type: ignore[arg-type]
    except SystemExit as stop:
        for cause in causes(stop):
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
        raise


def _split(words: Sequence[str]) -> tuple[str | None, set[str], list[str]]:
    """Command, flags, settings. Flags may stand anywhere."""
    flags: set[str] = set()
    rest: list[str] = []
    for word in words:
        if word in ("-h", "--help"):
            flags.add("--help")
        elif word in OPTIONS:
            flags.add(word)
        else:
            rest.append(word)
    name = next((word for word in rest if not _is_flag(word)), None)
    if name is not None:
        rest.remove(name)
    if name is not None and name not in COMMANDS:
        raise UserError(f"unknown command '{name}'{did_you_mean(name, COMMANDS)}")
    if name is None and "--print-config" in flags:
        raise UserError("--print-config needs a command, as in kvpop train --print-config")
    return name, flags, rest


def _is_flag(word: str) -> bool:
    return word.startswith("-") and "=" not in word


def _is_text(word: str) -> bool:
    """No key and no option looks so: `What is x if x=5?`, `--help me`, `-` (standard input)."""
    return word == "-" or bool(re.search(r"\s", word.partition("=")[0].strip()))


def _settings(command: Command | None, words: Sequence[str]) -> list[str]:
    """The words with a command's own flags and its argument written as settings."""
    own: dict[str, str] = getattr(command, "FLAGS", {})
    argument: str | None = getattr(command, "ARGUMENT", None)
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        free = argument is not None and not any(w.startswith(f"{argument}=") for w in found)
        if free and _is_text(word):
            found.append(f"{argument}={word}")
        elif word in own and own[word].endswith("="):  # a flag with a value; given twice, both hold
            value = next(rest, "")
            if not value or _is_flag(value):
                raise UserError(f"{word} needs a value")
            given = next((index for index, w in enumerate(found) if w.startswith(own[word])), None)
            if given is None:
                found.append(own[word] + value)
            else:
                found[given] += f" {value}"
        elif word in own:
            found.append(own[word])
        elif _is_flag(word):
            raise UserError(f"unknown option {word}{did_you_mean(word, (*OPTIONS, *own))}")
        elif free and "=" not in word:
            found.append(f"{argument}={word}")
        else:
            found.append(word)
    return found


def _nothing_before(settings: Sequence[str]) -> list[str]:
    return []


def _set_up_process() -> None:
    """Our own messages from INFO on, of the libraries only what a user must know."""
    logger = logging.getLogger("kvpop_lightning")
    if not logger.handlers:  # on our logger, not on the root: Lightning has handlers of its own
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)  # devices found, advertisements
    warnings.filterwarnings("ignore", message=r".*LeafSpec.* is deprecated", category=FutureWarning)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns at every fork of a loader's worker
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():  # the libraries' bars fill a log with one line of thousands of steps
        os.environ.setdefault("TQDM_DISABLE", "1")


def _say_that_it_begins(name: str) -> None:
    """On a terminal only: importing torch takes seconds, on a busy machine many, without a word."""
    if sys.stderr.isatty() and "torch" not in sys.modules:
        _say(f"kvpop {name} {__version__}: loading the libraries ...")


def _report(error: BaseException, call: Call | None) -> int:
    """One line for what the user can mend, the traceback for what is our fault; returns the exit status."""
    if os.environ.get("KVPOP_TRACEBACK"):
        traceback.print_exception(error)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        typed = " ".join([call.command, *call.overrides]).replace(" sweep.name=", " ") if call else ""
        by = "make" if typed == "demo" and "MAKELEVEL" in os.environ else "kvpop"
        again = f"{by} {typed}" if typed and call and call.command in GOES_ON else ""
        how = "terminated" if isinstance(error, Terminated) else "interrupted"
        _say(f"{how}: run the same command again to go on from where it stopped ({again})" if again else how)
        return TERMINATED if isinstance(error, Terminated) else INTERRUPTED
    if isinstance(error, ConfigError):
        for problem in error.problems:
            _say(f"error: {problem}")
        return MISTAKE
    if line := _mendable(error):
        _say(f"error: {line}")
        return MISTAKE
    traceback.print_exception(error)
    return 1


def _mendable(error: BaseException) -> str | None:
    """The line for a mistake that the user can mend, None for a fault of the program."""
    if is_disk_full(error):
        where = path_without_room(error)
        return (
            f"no space left on the disk{f' while writing {where}' if where else ''}: free some, or point "
            "run_dir, data.cache_dir, model.cache_dir or trainer.feature_cache_dir elsewhere; what was "
            "finished is kept"
        )
    if isinstance(error, UserError):
        return _one_line(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    # By the house rule our own code raises a plain ValueError only for a user's mistake; elsewhere it may be
    # anything.
    if type(error) is ValueError and _raised_in_package(error):
        return _one_line(error)
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _raised_in_package(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
