"""What every scorer offers, learned or not (METHOD.md, section 5).

All KV heads of one layer are scored by one module. The number of heads is read from the tensors, never stored
for
computing: every parameter and buffer carries a leading head axis (hidden statistics: a leading group axis),
so the scorers of all layers can be concatenated along it and run as one with `torch.func.functional_call`
(`kvpop_lightning.policy.scorers.stack`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

INPUTS = ("kv", "hidden", "kv_hidden")


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Switches autocast off where the device knows it (the meta device does not)."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class Tokens(NamedTuple):
    """Some tokens of each row, as the bounded cache hands them to `Scorer.extend`."""

    key: Tensor
    """[B, H, N, D] after RoPE."""
    value: Tensor
    """[B, H, N, D]."""
    hidden: Tensor | None
    """[B, N, Hid], or None when the scorer does not need it."""
    position: Tensor
    """int64 [B, N], position inside the document."""
    valid: Tensor
    """bool [B, N]; False = filler that nobody absorbs or scores."""


class Scorer(nn.Module, ABC):
    """Gives every token of every KV head a score in nats of log-mass: the higher, the longer it is kept.

    Scores are float32 (float64 when the scorer or, for rules without parameters, the key is float64),
    whatever the model's dtype and under autocast too. Inputs are detached: no gradient reaches the model
    through a score.
    """

    kind: ClassVar[str]
    """Name that `build_scorer` knows it by."""
    stateful: bool = False
    """True when the score of a token depends on other tokens."""
    stepwise: bool = False
    """True for a rule without priorities, which decides query by query from what is held
    (`policy/stepwise.py`)."""
    ragged: bool = False
    """True for a rule that closes keys by a gate, whatever the budget (`policy/ragged.py`)."""
    gated: bool = False
    """True when it is trained through a soft mask on the attention, by the distillation itself."""
    borrows: bool = False
    """True when it takes a channel of query and key out of the attention for itself (`policy/borrow.py`)."""
    merges: bool = False
    """True when keys and values are merged in place of being dropped (`policy/merge.py`)."""
    delay: int = 0
    """Tokens after t that must have been absorbed before t is scored (0 for stateless scorers)."""

    def __init__(self, num_heads: int, head_dim: int, hidden_size: int, inputs: str = "kv") -> None:
        super().__init__()
        if inputs not in INPUTS:
            raise ValueError(f"scorer.inputs must be one of {', '.join(INPUTS)}, got {inputs!r}")
        self.num_heads, self.head_dim, self.hidden_size = num_heads, head_dim, hidden_size
        self.inputs = inputs

    @property
    def needs_hidden(self) -> bool:
        """True when `hidden` must be given."""
        return self.inputs != "kv"

    def options(self) -> dict[str, Any]:
        """JSON-able keyword arguments of `build_scorer` that rebuild this scorer (shapes excluded)."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description: `scorer_from_dict` builds a scorer of the same type and shapes."""
        return {
            "type": self.kind,
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.hidden_size,
            **self.options(),
        }

    def dtype_for(self, key: Tensor) -> torch.dtype:
        """The dtype that scores are computed in: that of the parameters, at least float32."""
        for parameter in self.parameters():
            return torch.promote_types(parameter.dtype, torch.float32)
        return torch.promote_types(key.dtype, torch.float32)

    def forward(
        self,
        key: Tensor,
        value: Tensor,
        hidden: Tensor | None = None,
        *,
        position: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Scores of whole rows at once, the parallel form.

        Args:
            key, value: [B, H, T, D].
            hidden: [B, T, Hid], or [B, G, T, Hid] with G dividing H (head h reads group h // (H / G)).
            position: int64 [B, T], position inside the document; None = 0..T-1.
            document_ids: int64 [B, T], -1 = padding; None = one document, no padding.

        Returns:
            [B, H, T]; padding, and tokens whose delayed read falls outside their document, score 0.

        Raises:
            ValueError: the scorer reads hidden states and `hidden` is None.
        """
        if self.needs_hidden and hidden is None:
            raise ValueError(f"a scorer with inputs={self.inputs!r} needs the layer's hidden states")
        if position is None:
            position = torch.arange(key.shape[2], device=key.device).expand(key.shape[0], -1)
        if hidden is not None:
            hidden = (
                (hidden if hidden.dim() == 4 else hidden[:, None]).detach() if self.needs_hidden else None
            )
        with full_precision(key.device):
            score = self.score_rows(key.detach(), value.detach(), hidden, position, document_ids)
        if document_ids is not None:
            score = torch.where((document_ids >= 0)[:, None], score, torch.zeros_like(score))
        return score

    def extend(
        self, state: dict[str, Tensor], new: Tokens, waiting: Tokens | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Absorbs `new` tokens and scores those that are `delay` places before them; equals `forward`.

        Args:
            state: from `init_state` or the previous call.
            new: C tokens, each row's real ones first (`valid` is a prefix).
            waiting: the `delay` tokens just before them, right-aligned (`valid` is a suffix); None when delay
                is 0.

        Returns:
            score [B, H, C]: entry c belongs to token c of concat(waiting, new) and is read after new token c
            was absorbed (arbitrary, but finite, where either is not valid); and the new state (the given one
            is not changed).
        """
        with full_precision(new.key.device):
            return self.score_step(state, new, waiting)

    @abstractmethod
    def score_rows(
        self, key: Tensor, value: Tensor, hidden: Tensor | None, position: Tensor, document_ids: Tensor | None
    ) -> Tensor:
        """`forward` with checked, detached inputs; hidden [B, G, T, Hid] or None."""

    def score_step(
        self, state: dict[str, Tensor], new: Tokens, waiting: Tokens | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`extend` without autocast. Stateless scorers: the score of the new tokens themselves."""
        hidden = new.hidden[:, None] if self.needs_hidden and new.hidden is not None else None
        return self.score_rows(new.key, new.value, hidden, new.position, None), state

    def init_state(self, batch_size: int, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """State of `batch_size` empty documents; every tensor has the batch as its first axis."""
        return {}

    def state_bytes(self, real_bytes: int = 4) -> int:
        """Bytes of state per sequence and KV head, at `real_bytes` per number."""
        return 0

    def set_standardization(
        self,
        key_mean: Tensor | None = None,
        key_std: Tensor | None = None,
        value_mean: Tensor | None = None,
        value_std: Tensor | None = None,
        hidden_mean: Tensor | None = None,
        hidden_std: Tensor | None = None,
    ) -> None:
        """Fixes the mean and standard deviation that inputs are standardised with (METHOD.md, section 5).

        key and value [H, D], hidden [Hid]; what the scorer does not read is ignored. Rules without parameters
        ignore it all.
        """
