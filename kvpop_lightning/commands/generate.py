"""`kvpop generate prompt="..."`: text from the retrofitted model through the bounded cache, as it comes."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpop_lightning.commands import Call
from kvpop_lightning.config.choices import TRAINED_POLICIES
from kvpop_lightning.config.policies import retrofit_options
from kvpop_lightning.config.schema import Config, PolicyConfig
from kvpop_lightning.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpop_lightning.commands.generation import Progress

    Show = Callable[[int, str, Progress, bool], None]

SUMMARY = 'stream text through the bounded cache: kvpop generate "..."'
DETAILS = """Uses the policy trained in RUN_DIR/policy/NAME when there is one, else the policy as
    configured (with a warning if it would need training). policy=full keeps every key, for comparison. A
    line shows the tokens seen and the keys and bytes held beside what a full cache would hold. prompt=-
    reads the prompt from standard input. samples=3 temperature=0.8 gives three continuations, one below
    the other; stop=["END"] ends a text before END."""
KEYS = (
    "generate.prompt",
    "generate.system",
    "generate.max_new_tokens",
    "generate.temperature",
    "generate.top_k",
    "generate.top_p",
    "generate.min_p",
    "generate.samples",
    "generate.stop",
    "generate.ignore_eos",
    "generate.beyond_positions",
    "generate.slots",
    "generate.backend",
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
ARGUMENT = "generate.prompt"


def run(config: Config, call: Call) -> int:
    prompt = config.generate.prompt
    if prompt == "-":
        prompt = sys.stdin.read().strip()
        if not prompt:
            raise UserError("generate.prompt=-: standard input was empty")
    if not prompt or not prompt.strip():
        raise UserError('generate.prompt is missing: kvpop generate prompt="What is 12 * 7?"')
    refuse_oracle(config)

    from kvpop_lightning.commands.generation import check_text, memory_named
    from kvpop_lightning.models import load_model

    check_text(prompt, "generate.prompt")
    with memory_named(config):
        model, tokenizer = load_model(config.model)
        model = with_cache_policy(model, config)
        screen = _Screen(config.generate.samples)
        try:
            generate(model, tokenizer, prompt, config, screen.show)
        finally:
            screen.close()
    return 0


def refuse_oracle(config: Config) -> None:
    if config.policy.name == "oracle":
        raise UserError("policy.name=oracle needs the future and cannot generate: choose another policy")


def generate(model: Any, tokenizer: Any, prompt: str, config: Config, show: Show) -> None:
    """Continuations of `prompt`; `show(sample, new text, where it stands, ended)` gets them as they come,
    and empty text after each prompt chunk."""
    from kvpop_lightning.commands.generation import Meter, encode, make_engine, sampling
    from kvpop_lightning.generation.runners import held_by

    settings = config.generate
    engine = make_engine(model, tokenizer, config, slots=min(settings.slots, settings.samples))
    meter = Meter(model)
    engine.on_read = lambda read, cache: show(0, "", meter.progress(read, held_by(cache)), False)
    stream = engine.stream(encode(tokenizer, prompt, settings), sampling(config))
    for new, piece in enumerate(stream, 1):
        done = piece.completion
        progress = meter.progress(done.position, engine.held(done), done.prompt_tokens + new)
        show(done.sample, piece.text, progress, done.finish is not None)


def with_cache_policy(model: Any, config: Config) -> Any:
    """The model with the policy trained in this run folder, or with the one it was exported with, else as the
    configuration describes it. A base that was trained with its policy is another model."""
    from kvpop_lightning.models import retrofit
    from kvpop_lightning.models.persist import load_beside, policy_name
    from kvpop_lightning.policy import Budget

    policy = config.policy
    if policy.name == "full":
        return model.eval()
    budget = Budget(policy.budget.sink, policy.budget.window, policy.budget.topk)
    trained = Path(config.run_dir) / "policy" / policy.name
    of_model = policy_name(config.model.path) if config.model.source == "path" and config.model.path else None
    if trained.is_dir() or of_model == policy.name:
        model = load_beside(trained if trained.is_dir() else str(config.model.path), model).eval()
        _say_other_budget(model, budget, config)
        return model
    if policy.name in TRAINED_POLICIES:
        also = f"; {config.model.path} comes with {of_model}: policy={of_model} uses it" if of_model else ""
        print(
            f"warning: {policy.name} is not trained in {config.run_dir}: a fresh scorer decides at random; "
            f"kvpop train policy={policy.name} run_dir={config.run_dir} trains it{also}",
            file=sys.stderr,
        )
    return retrofit(model, budget=budget, **retrofit_options(config)).eval()


def _say_other_budget(model: Any, budget: Any, config: Config) -> None:
    """A saved policy brings its budget; a command that asks for another one is told."""
    from kvpop_lightning.policy.memory import equal_bytes_budget

    if config.policy.equal_bytes:
        with suppress(ValueError):  # too small a budget to pay for the saved scorer's state: another one
            budget = equal_bytes_budget(budget, model.kvpop.layer_scorer(0))
    own = model.kvpop.budget
    if own != budget and config.policy.budget != PolicyConfig().budget:  # else nobody asked for one
        print(
            f"warning: the saved {config.policy.name} keeps its own budget, sink={own.sink} "
            f"window={own.window} topk={own.topk}; policy.budget.* of this command is not used",
            file=sys.stderr,
        )


class _Screen:
    """A terminal gets the text with a live line under it; a pipe gets the text alone and the last line on
    stderr. Of several samples the first that has not ended is shown as it comes, the next ones after it."""

    def __init__(self, samples: int = 1) -> None:
        self._texts = [""] * samples
        self._ended = [False] * samples
        self._current, self._written = 0, 0
        self._last: Progress | None = None
        self._live: Any = None
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(transient=True, refresh_per_second=8)
            self._live.start()

    def show(self, sample: int, piece: str, progress: Progress, ended: bool) -> None:
        self._texts[sample] += piece
        self._ended[sample] = ended
        self._last = progress
        if self._live is None:
            self._write()
            return
        from rich.console import Group
        from rich.text import Text

        height = max(4, self._live.console.height - 3)
        shown = "\n".join(self._whole().splitlines()[-height:])
        self._live.update(Group(Text(shown), Text(progress.line(), style="dim")))

    def _title(self, sample: int) -> str:
        return f"--- sample {sample + 1}\n" if len(self._texts) > 1 else ""

    def _whole(self) -> str:
        return "\n".join(self._title(number) + text for number, text in enumerate(self._texts))

    def _write(self) -> None:
        """What can be printed now: the current sample, and those behind it once it has ended."""
        while self._current < len(self._texts):
            text = self._texts[self._current]
            start = (
                self._title(self._current)
                if not self._written and (text or self._ended[self._current])
                else ""
            )
            print(start + text[self._written :], end="", flush=True)
            self._written = len(text)
            if not self._ended[self._current] or self._current + 1 == len(self._texts):
                return
            print(flush=True)
            self._current, self._written = self._current + 1, 0

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        if self._last is None:  # refused before anything could be shown
            return
        if self._live is not None:
            print(self._whole(), end="")
        print(flush=True)
        print(self._last.line(), file=sys.stderr, flush=True)
