"""Chat messages to tokens with a loss mask, under the model's own chat template.

The template is rendered once with placeholders for the contents, which gives the scaffolding around them and
so the exact characters of each content; the finished text is tokenised in one go, so that no token boundary
depends on where the loss mask begins. A tokenizer without a template gets a plain format.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpop_lightning.errors import UserError

Message = dict[str, str]


@dataclass(frozen=True)
class Rendered:
    """One document as tokens.

    `input_ids` int32 [N]; `loss_mask` bool [N], the supervised tokens; `offsets` int64 [N, 2], each token's
    characters in the rendered text; `contents`, the characters of each message's content in the same text.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    contents: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.input_ids)


class ChatRenderer:
    """Renders messages under a tokenizer.

    Args:
        tokenizer: a transformers tokenizer backed by the tokenizers library (offsets are needed).
        loss_on: `assistant` (contents of assistant messages and the token that ends them) or `all`.
    """

    def __init__(self, tokenizer: Any, loss_on: str = "assistant") -> None:
        if loss_on not in ("assistant", "all"):
            raise UserError(f"data.loss_on must be assistant or all, got {loss_on!r}")
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(f"{type(tokenizer).__name__} gives no character offsets; use a fast tokenizer")
        self.tokenizer = tokenizer
        self.loss_on = loss_on
        self._specials = sorted(filter(None, tokenizer.all_special_tokens), key=len, reverse=True)

    def __call__(self, messages: Sequence[Message]) -> Rendered:
        """Tokens of a conversation; see `Rendered`."""
        text, contents = self._text(messages)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        mask = np.full(len(offsets), self.loss_on == "all")
        if self.loss_on == "assistant":
            for message, (start, end) in zip(messages, contents, strict=True):
                if message["role"] == "assistant":
                    mask |= (offsets[:, 0] >= start) & (offsets[:, 0] < self._with_ending(text, end))
        return Rendered(np.asarray(encoded["input_ids"], dtype=np.int32), mask, offsets, tuple(contents))

    def _with_ending(self, text: str, end: int) -> int:
        """The model must learn to stop: the special token that closes an assistant turn is supervised too."""
        for special in self._specials:
            if text.startswith(special, end):
                return end + len(special)
        return end

    def _text(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        if not getattr(self.tokenizer, "chat_template", None):
            return self._plain(messages)
        text = self._apply(messages)
        marks = [f"\ue010{i}\ue011" for i in range(len(messages))]
        scaffold = self._apply([{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)])
        pieces = re.split("\ue010[0-9]+\ue011", scaffold)
        for trimmed in (False, True):
            bodies = [m["content"].strip() if trimmed else m["content"] for m in messages]
            built, spans = _interleave(pieces, bodies)
            if built == text:
                return text, spans
        # The template looks into the contents (it may drop earlier reasoning): find what is left of them in
        # order.
        spans, cursor = [], 0
        for message in messages:
            body = message["content"].strip()
            start = text.find(body, cursor)
            start = cursor if start < 0 else start
            cursor = start + (len(body) if text.startswith(body, start) else 0)
            spans.append((start, cursor))
        return text, spans

    def _apply(self, messages: Sequence[Message]) -> str:
        return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False))

    def _plain(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        end = self.tokenizer.eos_token or ""
        pieces = [self.tokenizer.bos_token or ""]
        for index, message in enumerate(messages):
            pieces[-1] += f"{'' if index == 0 else chr(10)}### {message['role']}\n"
            pieces.append(end)
        return _interleave(pieces, [m["content"] for m in messages])


def _interleave(pieces: Sequence[str], bodies: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """pieces[0] bodies[0] pieces[1] ...; empty text when the numbers do not match."""
    if len(pieces) != len(bodies) + 1:
        return "", []
    text, spans = pieces[0], []
    for body, piece in zip(bodies, pieces[1:], strict=True):
        spans.append((len(text), len(text) + len(body)))
        text += body + piece
    return text, spans


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 over vocabulary, merges, added tokens and chat template; not over the folder it came from."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    # Truncation and padding are settings of the last call, not part of the tokenizer.
    state.pop("truncation", None)
    state.pop("padding", None)
    content = {
        "state": state,
        "template": getattr(tokenizer, "chat_template", None),
        "eos": tokenizer.eos_token,
        "bos": tokenizer.bos_token,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
