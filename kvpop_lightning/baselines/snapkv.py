"""SnapKV: the prompt is cut once, by what its last queries attend (Li et al., 2024; docs/baselines.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.budget import Budget
from kvpop_lightning.policy.scorers import register_scorer
from kvpop_lightning.policy.stepwise import Held, Moment, StepwiseRule


class SnapKV(StepwiseRule):
    """After the prompt: mean attention of its last `observed` queries, mean over the group, average pooling.

    The newest keys of the prompt are kept (`observed` of them, half the budget at most), then the best of the
    rest until `total - 1` are held. From there on each KV head drops the key that its newest queries attend
    least (TOVA per head) or have attended least since the window (H2O). A prompt shorter than the budget is
    not cut. The prompt itself is held whole: its first tokens are exempt from the budget (METHOD.md, section
    7).

    Args:
        prompt_length: tokens of every text that are its prompt, without padding; or one number per row of the
            batch (a list or tensor). It may be set anew for the next batch, before `cache.reset()`.
        observed: queries whose attention counts.
        pool: width of the average pooling over positions, odd.
        decode: `tova_head` or `h2o`.
    """

    kind = "snapkv"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden_size: int,
        *,
        prompt_length: int | Sequence[int] | Tensor = 256,
        observed: int = 64,
        pool: int = 5,
        decode: str = "tova_head",
    ) -> None:
        super().__init__(num_heads, head_dim, hidden_size)
        if observed < 1 or pool < 1 or pool % 2 == 0:
            raise ValueError(f"snapkv: observed must be at least 1 and pool odd, got {observed} and {pool}")
        if decode not in ("tova_head", "h2o"):
            raise ValueError(f"snapkv: decode must be tova_head or h2o, got {decode!r}")
        self.observed, self.pool, self.decode = observed, pool, decode
        self.prompt_length = prompt_length

    @property
    def prompt_length(self) -> int | list[int]:
        return self._prompt_length

    @prompt_length.setter
    def prompt_length(self, given: int | Sequence[int] | Tensor) -> None:
        length = given.tolist() if isinstance(given, Tensor) else given
        lengths = [length] if isinstance(length, int) else list(length)
        if not lengths or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in lengths):
            raise ValueError(
                "snapkv: prompt_length must be a whole number of tokens, at least 1, or one per row, "
                f"got {given!r}"
            )
        self._prompt_length: int | list[int] = length if isinstance(length, int) else lengths

    def options(self) -> dict[str, Any]:
        return {
            "prompt_length": self.prompt_length,
            "observed": self.observed,
            "pool": self.pool,
            "decode": self.decode,
        }

    def protected(self, budget: Budget) -> tuple[int, int]:
        return 0, 1

    def prompt_tokens(self, budget: Budget) -> int:
        lengths = self.prompt_length
        longest = lengths if isinstance(lengths, int) else max(lengths)
        return longest if longest >= budget.total else 0

    def prompts(self, held: Held, budget: Budget) -> int | Tensor:
        if "prompt" not in held.state:
            return self.prompt_tokens(budget)
        given = held.state["prompt"]
        return given.masked_fill(given < budget.total, 0)

    def by_row(self, rows: int) -> list[tuple[StepwiseRule, list[int]]]:
        lengths = self.prompt_length
        if isinstance(lengths, int):
            return super().by_row(rows)
        self._check_rows(rows)
        alike: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            alike.setdefault(length, []).append(row)
        return [(self._with(length), chosen) for length, chosen in alike.items()]

    def _with(self, prompt_length: int) -> SnapKV:
        options = self.options() | {"prompt_length": prompt_length}
        return SnapKV(self.num_heads, self.head_dim, self.hidden_size, **options)

    def _check_rows(self, rows: int) -> None:
        if isinstance(self.prompt_length, list) and len(self.prompt_length) != rows:
            raise ValueError(
                f"snapkv: prompt_length names {len(self.prompt_length)} rows, but the batch has {rows}: give "
                "one number per row, or one for all"
            )

    def new_state(self, batch: int, heads: int, like: Tensor) -> dict[str, Tensor]:
        if isinstance(self.prompt_length, int):
            return {}
        self._check_rows(batch)
        return {"prompt": torch.tensor(self.prompt_length, dtype=torch.int64, device=like.device)}

    def text_bytes(self, real_bytes: int = 4) -> int:
        return 0 if isinstance(self.prompt_length, int) else 8

    def new_notes(self, batch: int, heads: int, slots: int, like: Tensor) -> dict[str, Tensor]:
        return {"attention": like.new_zeros(batch, heads, slots)}

    def observe(self, held: Held, moment: Moment) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        before, now = held.notes["attention"], moment.probability.mean(2)
        place, length = moment.position[:, None, None], self._lengths(held)
        in_prompt = place < length
        summed = torch.where(place >= length - self.observed, before + now, before)
        later = now if self.decode == "tova_head" else summed
        return {"attention": torch.where(in_prompt, summed, later)}, held.state

    def _lengths(self, held: Held) -> int | Tensor:
        """Prompt lengths, int64 [B, 1, 1] where rows have their own."""
        if "prompt" in held.state:
            return held.state["prompt"][:, None, None]
        assert isinstance(self.prompt_length, int)
        return self.prompt_length

    def value_of(self, held: Held, newest: Tensor) -> Tensor:
        return held.notes["attention"]

    def keep_of_prompt(self, held: Held, budget: Budget) -> Tensor:
        length, wanted = self._lengths(held), budget.total - 1
        recent = min(self.observed, budget.total // 2, wanted)
        slot = torch.arange(held.position.shape[-1], device=held.position.device)
        old, newest = slot < length - recent, (slot >= length - recent) & (slot < length)
        score = held.notes["attention"].masked_fill(~old, 0.0)
        pooled = avg_pool1d(score.flatten(0, 1)[:, None], self.pool, 1, self.pool // 2)[:, 0].view_as(score)
        pooled = pooled.masked_fill(~old, -torch.inf)
        # The newest among equals: of a reversed row, a stable sort puts them first.
        order = pooled.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., : wanted - recent]
        keep = torch.zeros_like(score, dtype=torch.bool)
        keep.scatter_(-1, slot.numel() - 1 - order, True)
        return keep | newest


register_scorer("snapkv", SnapKV, ("prompt_length", "observed", "pool", "decode"))
register(PolicySpec("snapkv", "snapkv", "prompt cut by its last queries' attention, then TOVA per head"))
