"""StreamingLLM: sinks and the most recent tokens, at their true positions (Xiao et al., 2023; PEERS.md)."""

from __future__ import annotations

from torch import Tensor

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.scorers import Scorer, register_scorer


class ConstantScorer(Scorer):
    """Score 0 for every token: among equals the newer wins, which is a sliding window of w + k."""

    kind = "streaming_llm"

    def score_rows(
        self, key: Tensor, value: Tensor, hidden: Tensor | None, position: Tensor, document_ids: Tensor | None
    ) -> Tensor:
        return key.new_zeros(key.shape[:3], dtype=self.dtype_for(key))


register_scorer("streaming_llm", ConstantScorer)
register(PolicySpec("streaming_llm", "streaming_llm", "sinks and the most recent tokens"))
register(
    PolicySpec(
        "streaming_llm_plus",
        "streaming_llm",
        "StreamingLLM with the base trained under its pattern",
        trained=True,
        trains_base=True,
    )
)
