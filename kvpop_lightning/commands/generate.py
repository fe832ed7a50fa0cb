"""`kvpop generate prompt="..."`: text from the retrofitted model through the bounded cache, as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpop_lightning.commands import Call
from kvpop_lightning.config.choices import TRAINED_POLICIES
from kvpop_lightning.config.policies import retrofit_options
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError

if TYPE_CHECKING:
    from kvpop_lightning.commands.generation import Progress

SUMMARY = 'stream text through the bounded cache: kvpop generate prompt="..."'
DETAILS = """Uses the policy trained in RUN_DIR/policy/NAME when there is one, else the policy as
    configured (with a warning if it would need training). policy=full keeps every key, for comparison. A
    line shows the tokens seen and the keys and bytes held beside what a full cache would hold. prompt=-
    reads the prompt from standard input."""
KEYS = (
    "generate.prompt",
    "generate.system",
    "generate.max_new_tokens",
    "generate.temperature",
    "generate.top_p",
    "generate.chunk",
    "generate.chat_template",
    "policy.name",
    "policy.budget.sink",
    "policy.budget.window",
    "policy.budget.topk",
    "model.source",
    "model.path",
    "model.device",
    "run_dir",
    "seed",
)
DEFAULT_EXPERIMENT: str | None = None


def run(config: Config, call: Call) -> int:
    prompt = config.generate.prompt
    if prompt == "-":
        prompt = sys.stdin.read().strip()
    if not prompt:
        raise UserError('generate.prompt is missing: kvpop generate prompt="What is 12 * 7?"')
    if config.policy.name == "oracle":
        raise UserError("policy.name=oracle needs the future and cannot generate: choose another policy")

    from kvpop_lightning.commands.generation import stream
    from kvpop_lightning.models import load_model

    model, tokenizer = load_model(config.model)
    model = with_cache_policy(model, config)
    screen = _Screen()
    progress: Progress | None = None
    for piece, progress in stream(model, tokenizer, prompt, config):
        screen.show(piece, progress)
    screen.close(progress)
    return 0


def with_cache_policy(model: Any, config: Config) -> Any:
    """The model with the policy trained in this run folder, else as the configuration describes it."""
    from kvpop_lightning.models import load, retrofit
    from kvpop_lightning.policy import Budget

    policy = config.policy
    if policy.name == "full":
        return model.eval()
    trained = Path(config.run_dir) / "policy" / policy.name
    if trained.is_dir():
        return load(trained, base=model).eval()
    if policy.name in TRAINED_POLICIES:
        print(
            f"warning: {policy.name} is not trained in {config.run_dir}: a fresh scorer decides at random; "
            f"kvpop train policy={policy.name} run_dir={config.run_dir} trains it",
            file=sys.stderr,
        )
    budget = Budget(policy.budget.sink, policy.budget.window, policy.budget.topk)
    return retrofit(model, budget=budget, **retrofit_options(config)).eval()


class _Screen:
    """A terminal gets the text with a live line under it; a pipe gets the text alone and the last line on
    stderr."""

    def __init__(self) -> None:
        self._text = ""
        self._live: Any = None
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(transient=True, refresh_per_second=8)
            self._live.start()

    def show(self, piece: str, progress: Progress) -> None:
        self._text += piece
        if self._live is None:
            print(piece, end="", flush=True)
            return
        from rich.console import Group
        from rich.text import Text

        height = max(4, self._live.console.height - 3)
        shown = "\n".join(self._text.splitlines()[-height:])
        self._live.update(Group(Text(shown), Text(progress.line(), style="dim")))

    def close(self, progress: Progress | None) -> None:
        if self._live is not None:
            self._live.stop()
            print(self._text, end="")
        print(flush=True)
        if progress is not None:
            print(progress.line(), file=sys.stderr, flush=True)
