"""The stateful scorer: a matrix memory, read `delay` tokens later (METHOD.md, section 5: KVpop_mlstm)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvpop_lightning.policy.scorers.base import Tokens
from kvpop_lightning.policy.scorers.delayed_read import DelayedRead
from kvpop_lightning.policy.scorers.learned import OUTPUT_GAIN, LearnedScorer, head_output
from kvpop_lightning.policy.scorers.mlstm_chunkwise import mlstm_chunkwise
from kvpop_lightning.policy.scorers.mlstm_forms import empty_state, mlstm_recurrent
from kvpop_lightning.policy.scorers.projection import InputProjection, unit_normal

GATE_GAIN = 0.1
FORGET_BIAS = (3.0, 7.0)
"""Initial forget gates, spread over the layer's heads: memories of about 20 to 1100 tokens."""
NORM_EPSILON = 1e-5
CHUNK = {"cpu": 32}
"""Chunk length of the parallel form by device type (measured); 64 elsewhere."""


class MLSTMScorer(LearnedScorer):
    """`r_t = w . silu(V norm(h) + W x_t + b) + c`, h read from the memory by t's query at t + delay.

    One input projection yields, per head, everything a token needs: when it is scored its query (d_m) and its
    share `W x_t + b` of the head (width), when it is absorbed its key (d_m), value (d_v), input and forget
    gate. `norm` is a root-mean-square norm with a gain per channel; `V` starts at the scale of a
    unit-variance map, the output so that scores start at about 0.1 nats; the gates start almost independent
    of the token.

    Parameters per head, I the size of x_t (2D, Hid or 2D + Hid) and P = 2 d_m + d_v + 2 + width:
    (I + 1) P + d_v + d_v * width + width + 1.

    Args:
        delay: tokens after t that are absorbed before t is scored, 0 <= delay <= the window.
        memory_dim, value_dim: d_m, d_v; the state costs 4 (d_m d_v + d_m + 1) bytes per head.

    Raises:
        ValueError: a size below 1, a negative delay.
    """

    kind = "mlstm"
    stateful = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden_size: int,
        *,
        inputs: str = "kv",
        width: int = 64,
        memory_dim: int = 16,
        value_dim: int = 32,
        delay: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_heads, head_dim, hidden_size, inputs)
        for name, size in (("width", width), ("memory_dim", memory_dim), ("value_dim", value_dim)):
            if size < 1:
                raise ValueError(f"scorer.{name} must be at least 1, got {size}")
        if delay < 0:
            raise ValueError(f"scorer.delay must be at least 0, got {delay}")
        self.width, self.memory_dim, self.value_dim, self.delay = width, memory_dim, value_dim, delay
        # Output columns: what a token needs to be scored, then what it needs to be absorbed.
        self.scored_sizes = [memory_dim, width]  # query, share of the head
        self.absorbed_sizes = [memory_dim, value_dim, 1, 1]  # key, value, input gate, forget gate
        self.scored = slice(0, sum(self.scored_sizes))
        self.absorbed = slice(self.scored.stop, self.scored.stop + sum(self.absorbed_sizes))
        gain = torch.ones(self.absorbed.stop, dtype=torch.float32)
        gain[-2:] = GATE_GAIN
        self.projection = InputProjection(
            num_heads, head_dim, hidden_size, inputs, self.absorbed.stop, gain=gain, generator=generator
        )
        with torch.no_grad():
            self.projection.bias[:, -1] = torch.linspace(*FORGET_BIAS, num_heads + 2, dtype=torch.float32)[
                1:-1
            ]
        self.norm_gain = nn.Parameter(torch.ones(num_heads, value_dim, dtype=torch.float32))
        self.read_weight = nn.Parameter(
            unit_normal(num_heads, value_dim, width, generator=generator) * value_dim**-0.5
        )
        self.output_weight = nn.Parameter(
            unit_normal(num_heads, width, generator=generator) * OUTPUT_GAIN / width**0.5
        )
        self.output_bias = nn.Parameter(torch.zeros(num_heads, dtype=torch.float32))

    def options(self) -> dict[str, Any]:
        return {
            "inputs": self.inputs,
            "width": self.width,
            "memory_dim": self.memory_dim,
            "value_dim": self.value_dim,
            "delay": self.delay,
        }

    def score_rows(
        self, key: Tensor, value: Tensor, hidden: Tensor | None, position: Tensor, document_ids: Tensor | None
    ) -> Tensor:
        """Chunkwise over whole rows; the memory starts anew in each document and never absorbs padding."""
        inputs = self.projection.standardize(key, value, hidden)
        sizes = [*self.scored_sizes, *self.absorbed_sizes]
        q, share, k, v, i, f = self.projection.project(inputs).split(sizes, dim=-1)
        read = DelayedRead.build(self.delay, document_ids)
        h, _ = mlstm_chunkwise(
            read.to_readers(q),
            k,
            v,
            i[..., 0],
            f[..., 0],
            document_ids=document_ids,
            chunk=CHUNK.get(key.device.type, 64),
        )
        return read.mask(self._head(read.to_tokens(h), share))

    def score_step(
        self, state: dict[str, Tensor], new: Tokens, waiting: Tokens | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        count = new.key.shape[2]
        absorbed = self._standardize(new)
        scored = absorbed
        if self.delay:
            assert waiting is not None, "a delayed scorer needs the tokens that wait in the window"
            if waiting.key.shape[2] != self.delay:
                raise ValueError(f"expected {self.delay} waiting tokens, got {waiting.key.shape[2]}")
            scored = self._standardize(_first(waiting, new, count))
        q, share = self.projection.project(scored, self.scored).split(self.scored_sizes, dim=-1)
        form = mlstm_recurrent if count == 1 else mlstm_chunkwise
        h, state = form(q, *self._absorb(absorbed), valid=new.valid, state=state)
        return self._head(h, share), state

    def init_state(self, batch_size: int, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """memory [B, H, d_m, d_v], normalizer [B, H, d_m], log_scale [B, H], in the scorer's dtype."""
        like = torch.empty(0, device=device or self.output_bias.device, dtype=self.output_bias.dtype)
        return empty_state(batch_size, self.output_bias.shape[0], self.memory_dim, self.value_dim, like)

    def state_bytes(self, real_bytes: int = 4) -> int:
        return real_bytes * (self.memory_dim * self.value_dim + self.memory_dim + 1)

    def _standardize(self, tokens: Tokens) -> dict[str, Tensor]:
        hidden = None
        if self.needs_hidden:
            if tokens.hidden is None:
                raise ValueError(f"a scorer with inputs={self.inputs!r} needs the layer's hidden states")
            hidden = tokens.hidden[:, None]
        return self.projection.standardize(tokens.key, tokens.value, hidden)

    def _absorb(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """key [B, H, T, d_m], value [B, H, T, d_v], input and forget gate [B, H, T]."""
        k, v, i, f = self.projection.project(inputs, self.absorbed).split(self.absorbed_sizes, dim=-1)
        return k, v, i[..., 0], f[..., 0]

    def _head(self, h: Tensor, share: Tensor) -> Tensor:
        """Score [B, H, T] from the readout [B, H, T, d_v] and the token's own share [B, H, T, width]."""
        normed = F.rms_norm(h, h.shape[-1:], eps=NORM_EPSILON)
        read = normed @ (self.norm_gain[..., None] * self.read_weight)
        return head_output(read + share, self.output_weight, self.output_bias)


def _first(waiting: Tokens, new: Tokens, count: int) -> Tokens:
    """The first `count` tokens of concat(waiting, new)."""

    def join(old: Tensor, fresh: Tensor, dim: int) -> Tensor:
        missing = count - old.shape[dim]
        if missing <= 0:
            return old.narrow(dim, 0, count)
        return torch.cat([old, fresh.narrow(dim, 0, missing)], dim=dim)

    hidden = None
    if waiting.hidden is not None and new.hidden is not None:
        hidden = join(waiting.hidden, new.hidden, 1)
    return Tokens(
        join(waiting.key, new.key, 2),
        join(waiting.value, new.value, 2),
        hidden,
        join(waiting.position, new.position, 1),
        join(waiting.valid, new.valid, 1),
    )
