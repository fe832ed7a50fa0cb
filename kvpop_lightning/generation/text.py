"""Tokens to text as they come, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TextStream:
    """Gives out text once no later token can change it and no stop string can begin in it.

    Attributes:
        stopped: a stop string came; the text ends before it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._start = self._given = 0
        self._held = ""
        """Decoded, but perhaps the beginning of a stop string."""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self._ids.append(token)
        return self._pass_on(self._decoded(last=False), last=False)

    def rest(self) -> str:
        """What was held back, at the end."""
        return "" if self.stopped else self._pass_on(self._decoded(last=True), last=True)

    def _decoded(self, *, last: bool) -> str:
        before = self._decode(self._ids[self._start : self._given])
        now = self._decode(self._ids[self._start :])
        if not last and (now.endswith("\ufffd") or len(now) <= len(before)):
            return ""  # half a character
        self._start, self._given = self._given, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _pass_on(self, new: str, *, last: bool) -> str:
        text, self._held = self._held + new, ""
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = 0
        if not last:
            keep = max(
                (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
            )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
