"""StreamingLLM: sinks and the most recent tokens, at their true positions (Xiao et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.baselines.streaming_rotated import RotatedStreaming
from kvpop_lightning.policy.scorers import Scorer, register_scorer


class ConstantScorer(Scorer):
    """Score 0 for every token: among equals the newer wins, which is a sliding window of w + k."""

    kind = "streaming_llm"

    def score_rows(
        self, key: Tensor, value: Tensor, hidden: Tensor | None, position: Tensor, document_ids: Tensor | None
    ) -> Tensor:
        return key.new_zeros(key.shape[:3], dtype=self.dtype_for(key))


def streaming_scorer(
    num_heads: int,
    head_dim: int,
    hidden_size: int,
    *,
    rerotate: bool = False,
    inv_freq: Sequence[float] | None = None,
    groups: int = 1,
) -> Scorer:
    """True positions, or with `rerotate` positions in the cache (`inv_freq` as the model rotates)."""
    if rerotate:
        return RotatedStreaming(num_heads, head_dim, hidden_size, inv_freq=inv_freq)
    return ConstantScorer(num_heads, head_dim, hidden_size)


register_scorer("streaming_llm", streaming_scorer, ("rerotate", "inv_freq", "groups"))
register_scorer(
    "streaming_llm_rotated",
    lambda *sizes, inv_freq=None, groups=1: RotatedStreaming(*sizes, inv_freq=inv_freq),
    ("inv_freq", "groups"),
)
register(PolicySpec("streaming_llm", "streaming_llm", "sinks and the most recent tokens", reads_rope=True))
register(
    PolicySpec(
        "streaming_llm_rotated",
        "streaming_llm_rotated",
        "the same at positions in the cache",
        reads_rope=True,
    )
)
register(
    PolicySpec(
        "streaming_llm_plus",
        "streaming_llm",
        "StreamingLLM with the base trained under its pattern",
        trained=True,
        trains_base=True,
    )
)
