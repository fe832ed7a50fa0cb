"""`kvpop chat`: a conversation that stays in one bounded cache, however long it gets."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvpop_lightning.commands import Call, generate
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError

if TYPE_CHECKING:
    from kvpop_lightning.generation import Completion, Engine

SUMMARY = "talk with the model: the conversation stays in its bounded cache"
DETAILS = """One line is one message. /reset forgets the conversation, /quit (or the end of the input) ends
    the program, Ctrl-C stops an answer and the conversation goes on from there. Earlier turns are never
    read again: each message is read behind what the cache holds, so that a turn costs the same however long
    the conversation is. The policy is chosen as for kvpop generate."""
KEYS = tuple(key for key in generate.KEYS if key not in ("generate.prompt", "generate.samples"))
DEFAULT_EXPERIMENT: str | None = None

HELP = "/reset forgets the conversation, /quit ends, Ctrl-C stops an answer"


def run(config: Config, call: Call) -> int:
    generate.refuse_oracle(config)
    if config.generate.prompt is not None:
        raise UserError("generate.prompt: a chat asks for its messages; kvpop generate takes a prompt")
    if config.generate.samples != 1:
        raise UserError(f"generate.samples={config.generate.samples}: a chat has one answer, set 1")

    from kvpop_lightning.commands.generation import make_engine, memory_named
    from kvpop_lightning.models import load_model

    with memory_named(config):
        model, tokenizer = load_model(config.model)
        model = generate.with_cache_policy(model, config)
        chat = Conversation(make_engine(model, tokenizer, config, slots=1), config)
        say(f"{config.model.name}, {config.policy.name}: {HELP}")
        return _talk(chat)


def _talk(chat: Conversation) -> int:
    while True:
        try:
            message = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            if sys.stdin.isatty():
                print()  # the shell's prompt begins a line of its own
            return 0
        except KeyboardInterrupt:  # at the prompt there is no answer to stop
            say("\n/quit ends")
            continue
        if message == "/quit":
            return 0
        if message == "/reset":
            chat.reset()
            say("forgotten")
        elif message == "/help":
            say(HELP)
        elif message.startswith("/"):
            say(f"unknown command {message.split()[0]}: {HELP}")
        elif message:
            _answer(chat, message)


def say(text: str) -> None:
    """What is not the model's goes to stderr: a pipe gets the answers alone."""
    print(text, file=sys.stderr, flush=True)


def _answer(chat: Conversation, message: str) -> None:
    try:
        with stopped_by_ctrl_c() as stop:
            for piece in chat.answer(message):
                print(piece, end="", flush=True)
                if stop:
                    chat.stop()
        print(flush=True)
        say(chat.line() + (" | stopped" if stop else ""))
    except UserError as error:  # a message too long for the positions that are left: the others stand
        say(f"error: {error}")


@contextmanager
def stopped_by_ctrl_c() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C is pressed; pressed again, it interrupts the program as usual."""
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """Turns that follow one another in one cache.

    Args:
        engine: with one slot.
        config: `generate.*` and `seed`.
    """

    def __init__(self, engine: Engine, config: Config) -> None:
        self.engine, self.config = engine, config
        self._last: Completion | None = None
        self._stop = False
        self._turn = 0
        self._meter: Any = None
        self._start = 0

    def reset(self) -> None:
        """Forgets everything said."""
        self._last, self._turn = None, 0

    def stop(self) -> None:
        """Ends the answer that is being given, after the token that is on its way."""
        self._stop = True

    def answer(self, message: str) -> Iterator[str]:
        """The answer's text as it comes.

        Raises:
            UserError: the conversation has reached the model's positions, or a message that is not text; it
                stays as it was.
        """
        from dataclasses import replace

        from kvpop_lightning.commands.generation import Meter, check_text, encode, encode_next, sampling

        check_text(message, "the message")
        settings, tokenizer, last = self.config.generate, self.engine.tokenizer, self._last
        follows = last is not None and last.kept is not None
        code = encode_next if follows else encode
        tokens = code(tokenizer, message, settings)
        # Each turn draws numbers of its own, the same ones in the next conversation.
        wanted = replace(sampling(self.config), seed=self.config.seed + self._turn)
        try:
            number = self.engine.submit(tokens, wanted, after=last if follows else None, keep=True)
        except UserError as error:
            raise UserError(f"{error}; /reset starts anew") from error
        self._stop, self._turn = False, self._turn + 1
        self._meter, self._start = Meter(self.engine.model), last.position if last and follows else 0
        while self.engine.busy:
            for piece in self.engine.step():
                self._last = piece.completion
                yield piece.text
            if self._stop:
                self.engine.cancel(number)

    def line(self) -> str:
        """Where the conversation stands, in one line."""
        assert self._last is not None
        seen = self._last.position
        line: str = self._meter.progress(seen, self.engine.held(self._last), seen - self._start).line()
        return line + (
            " | the model's positions are used up: /reset" if self._last.finish == "positions" else ""
        )
