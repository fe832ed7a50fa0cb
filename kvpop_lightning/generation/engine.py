"""The engine: requests wait, take a free slot, generate side by side, leave; none waits for another's end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from typing import Any, cast

from kvpop_lightning.errors import UserError
from kvpop_lightning.generation.requests import Completion, Piece, Running, Waiting
from kvpop_lightning.generation.runners import Held, Runner, make_runner
from kvpop_lightning.generation.sampling import Sampling, choose
from kvpop_lightning.generation.text import TextStream


class Engine:
    """Continuations of many prompts on one model, in a fixed number of slots.

    Args:
        model: retrofitted (its policy's cache) or plain (every key is kept), in evaluation mode.
        tokenizer: for prompts given as text, for text and stop strings; None = tokens only.
        slots: continuations at a time.
        chunk: prompt tokens a forward call.
        backend: see `make_runner`.
        beyond_positions: read and generate past the model's trained positions (else a prompt that fills
            them is refused, and a continuation ends at them with `finish="positions"`).
        on_read: called after each chunk of a prompt with the tokens read so far and the cache they are in.

    The tokens of a request depend on its prompt, settings and seed, never on what runs beside it.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, slots: int = 8, chunk: int = 256, backend: str = "auto",
        beyond_positions: bool = False, runner: Runner | None = None,
        on_read: Callable[[int, Any], None] | None = None,
    ) -> None:  # fmt: skip
        for name, value in (("slots", slots), ("chunk", chunk)):
            if value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        self.model, self.tokenizer, self.chunk, self.on_read = model, tokenizer, chunk, on_read
        self.runner = runner or make_runner(model, slots, backend)
        positions = getattr(model.config, "max_position_embeddings", None)
        self.positions = None if beyond_positions else positions
        found = [
            getattr(model.generation_config, "eos_token_id", None),
            getattr(tokenizer, "eos_token_id", None),
        ]
        flat = [token for item in found for token in (item if isinstance(item, list) else [item])]
        self.end_tokens = {int(token) for token in flat if token is not None}
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._waiting: deque[Waiting] = deque()
        self._running: dict[int, Running] = {}
        self._requests = 0
        self._followed: dict[int, deque[Piece]] = {}
        """What `stream` and `generate` have not taken yet, by request: each gets its own, whoever steps."""
        self._failed: dict[int, Exception] = {}
        """Why a prompt could not be read, until whoever asked for it is told."""
        self._unclaimed: list[Piece] = []
        """Pieces of all other requests, for the next `step`."""

    def submit(
        self, prompt: str | Sequence[int], settings: Sampling | None = None, *,
        after: Completion | None = None, keep: bool = False,
    ) -> int:  # fmt: skip
        """Puts a prompt in the queue; returns the request's number.

        Args:
            after: an ended continuation that was kept: the prompt goes on behind it, in the cache it left
                (once; what it keeps is used up).
            keep: keep what each continuation leaves behind (`Completion.kept`), also when it is cancelled.

        Raises:
            UserError: an empty prompt, one that fills the model's positions, text or stop strings without a
                tokenizer, an `after` that keeps nothing.
        """
        settings = settings or Sampling()
        if self.tokenizer is None and (isinstance(prompt, str) or settings.stop):
            raise UserError(
                "prompts as text and stop strings need a tokenizer: pass Engine(model, tokenizer)"
            )
        if isinstance(prompt, str):
            prompt = self.tokenizer(prompt)["input_ids"] if prompt else []
        tokens, start = self._checked(prompt), 0
        if after is not None:
            if after.finish is None or after.kept is None:
                raise UserError("nothing is kept of that continuation: submit it with keep=True, and wait")
            tokens, start = after.unread + tokens, after.position
        if self.positions is not None and start + len(tokens) >= self.positions:
            behind = f" behind {start} others" if start else ""
            raise UserError(
                f"the prompt has {len(tokens)} tokens{behind}, the model {self.positions} positions: shorten "
                "it, or set beyond_positions (generate.beyond_positions=true) to read on past those it knows"
            )
        number, self._requests = self._requests, self._requests + 1
        cache = None
        if after is not None:  # taken here, so that no second prompt goes on from it
            cache, after.kept = after.kept, None
        self._waiting.append(Waiting(number, tokens, settings, start, cache, keep))
        return number

    def _checked(self, prompt: str | Sequence[int]) -> list[int]:
        try:
            tokens = [index(token) for token in cast(Sequence[int], prompt)]
        except TypeError:
            raise UserError(f"a prompt is text or a list of token ids, got {prompt!r:.60}") from None
        if not tokens:
            raise UserError("the prompt is empty: give at least one token")
        if wrong := [token for token in tokens if not 0 <= token < self.vocabulary]:
            raise UserError(f"token id {wrong[0]} in the prompt: the vocabulary has {self.vocabulary} tokens")
        return tokens

    def cancel(self, request: int) -> None:
        """Ends a request: what waits is forgotten, what runs frees its slots and ends as `cancelled`."""
        self._waiting = deque(one for one in self._waiting if one.request != request)
        self._failed.pop(request, None)
        for slot, one in list(self._running.items()):
            if one.completion.request == request:
                one.completion.finish = "cancelled"
                self._leave(slot)
                self._deliver(Piece(one.completion, ""))

    @property
    def busy(self) -> bool:
        """A request waits or runs, or `step` has pieces to give."""
        return bool(self._waiting or self._running or self._unclaimed or self._failed)

    def step(self) -> list[Piece]:
        """Fills free slots, then one token for each running continuation. Returns what requests got, by slot,
        that no `stream` or `generate` follows, with what they got while one of those went on.

        Raises:
            Exception: why the prompt of such a request could not be read; the request is gone then.
        """
        self._advance()
        self._raise([number for number in self._failed if number not in self._followed])
        pieces, self._unclaimed = self._unclaimed, []
        return pieces

    def _deliver(self, piece: Piece) -> None:
        self._followed.get(piece.completion.request, self._unclaimed).append(piece)

    def _knows(self, request: int) -> bool:
        """There is more to come of it, if only its error."""
        if request in self._failed:
            return True
        running = any(one.completion.request == request for one in self._running.values())
        return running or any(one.request == request for one in self._waiting)

    def _advance(self) -> None:
        self._fill()
        slots = sorted(self._running)
        if not slots:
            return
        import torch

        running = [self._running[slot] for slot in slots]
        drawn = [one.numbers.random() if one.settings.temperature else 0.0 for one in running]
        chosen = choose(
            torch.stack([one.logits for one in running]), [one.settings for one in running], drawn
        )
        going = {}
        for slot, one, token in zip(slots, running, chosen, strict=True):
            self._deliver(Piece(one.completion, self._accept(one, token)))
            if one.completion.finish is None:
                going[slot] = token
            else:
                self._leave(slot)
        if going:
            try:
                found = self.runner.step(going)
            except BaseException:  # what these texts' caches hold now is unknown
                for slot in going:
                    one = self._running.pop(slot)
                    one.completion.finish = "cancelled"
                    self._deliver(Piece(one.completion, ""))
                raise
            for slot, logits in found.items():
                self._running[slot].logits = logits

    def held(self, completion: Completion) -> Held:
        """What its slot holds now; once it has ended, until another text takes the slot."""
        return self.runner.held(completion.slot)

    def _leave(self, slot: int) -> None:
        one = self._running.pop(slot)
        if one.keep:
            one.completion.kept = self.runner.take(slot)

    def _accept(self, one: Running, token: int) -> str:
        """Takes the token into the continuation and decides whether that ends; returns the new text."""
        done, settings = one.completion, one.settings
        text = ""
        if token in self.end_tokens and not settings.ignore_eos:
            done.finish = "end"
        else:
            done.tokens.append(token)
            text = one.text.push(token) if one.text is not None else ""
            if one.text is not None and one.text.stopped:
                done.finish = "stop"
            elif len(done.tokens) >= settings.max_new_tokens:
                done.finish = "length"
            elif self.positions is not None and done.prompt_tokens + len(done.tokens) >= self.positions:
                done.finish = "positions"
        if done.finish not in (None, "end"):
            done.unread = [token]
        if done.finish is not None and one.text is not None:
            text += one.text.rest()
            if one.text.stopped and done.finish in ("end", "length", "positions"):
                done.finish = "stop"
        done.text += text
        return text

    def _read(self, one: Waiting) -> bool:
        """Reads a prompt; False when there is nothing to run: it failed, or was cancelled while it was read.
        Its error is for whoever asked for it, the others go on.
        """
        cache, one.cache = one.cache, None
        try:
            one.read = self.runner.read(one.tokens, self.chunk, cache, self.on_read)
        except BaseException as error:
            if one in self._waiting:
                self._waiting.remove(one)
            if not isinstance(error, Exception):
                raise
            self._failed[one.request] = error
        return one in self._waiting

    def _raise(self, requests: Iterable[int]) -> None:
        for request in requests:
            if request in self._failed:
                raise self._failed.pop(request)

    def _fill(self) -> None:
        free = [slot for slot in range(self.runner.slots) if slot not in self._running]
        while free and self._waiting:
            first = self._waiting[0]
            if first.read is None and not self._read(first):
                continue
            assert first.read is not None
            slot = free.pop(0)
            self.runner.put(slot, first.read[0])
            done = Completion(first.request, first.sample, first.start + len(first.tokens), slot=slot)
            stream = None if self.tokenizer is None else TextStream(self.tokenizer, first.settings.stop)
            numbers = first.settings.numbers(first.sample)
            self._running[slot] = Running(done, first.settings, numbers, first.read[1], stream, first.keep)
            first.sample += 1
            if first.sample == first.settings.samples:
                self._waiting.popleft()

    def stream(
        self, prompt: str | Sequence[int], settings: Sampling | None = None, *,
        after: Completion | None = None, keep: bool = False,
    ) -> Iterator[Piece]:  # fmt: skip
        """The pieces of one request as they come; leaving the loop early cancels it."""
        number = self.submit(prompt, settings, after=after, keep=keep)
        mail = self._followed[number] = deque()
        try:
            while mail or self._knows(number):
                while mail:
                    yield mail.popleft()
                self._raise([number])
                self._advance()
        finally:
            self.cancel(number)
            del self._followed[number]

    def generate(
        self, prompts: Sequence[str | Sequence[int]], settings: Sampling | Sequence[Sampling] | None = None,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> list[list[Completion]]:  # fmt: skip
        """All continuations of all prompts, in the prompts' order whatever the order they end in.

        Raises:
            UserError: one text in place of a list, settings that are not one a prompt, or as `submit`.
                Nothing of the call stays in the engine then, nor when `on_piece` raises.
        """
        if isinstance(prompts, str):
            raise UserError("prompts must be a list: generate([text]), or stream(text) for one")
        each = list(settings) if isinstance(settings, Sequence) else [settings or Sampling()] * len(prompts)
        if len(each) != len(prompts):
            raise UserError(f"{len(prompts)} prompts and {len(each)} settings: give one for all, or one each")
        mails: dict[int, deque[Piece]] = {}
        found: dict[int, dict[int, Completion]] = {}
        try:
            for prompt, one in zip(prompts, each, strict=True):
                number = self.submit(prompt, one)
                mails[number] = self._followed[number] = deque()
                found[number] = {}
            while any(mails.values()) or any(self._knows(number) for number in mails):
                self._raise(mails)
                self._advance()
                for number, mail in mails.items():
                    while mail:
                        piece = mail.popleft()
                        found[number][piece.completion.sample] = piece.completion
                        if on_piece is not None:
                            on_piece(piece)
        finally:
            for number in mails:
                self.cancel(number)
                del self._followed[number]
        return [[of[sample] for sample in sorted(of)] for of in found.values()]
