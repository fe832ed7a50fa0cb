"""Oracle: the future-attention target itself as the score (METHOD.md, section 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.scorers import Scorer, Tokens, register_scorer


class OracleScorer(Scorer):
    """Scores handed in from outside, for one batch of texts at a time.

    `forward` takes them by row index, `extend` by position in the document, so that decoding a text token by
    token meets the same scores (one document per row there, as the cache demands).
    """

    kind = "oracle"

    def __init__(self, num_heads: int, head_dim: int, hidden_size: int) -> None:
        super().__init__(num_heads, head_dim, hidden_size)
        self._by_row: Tensor | None = None
        self._by_position: Tensor | None = None

    def set_scores(self, scores: Tensor | None, document_ids: Tensor | None = None) -> None:
        """Scores [B, H, T] in nats of the next texts, by row index; None forgets them.

        `document_ids` int64 [B, T] is only needed to decode padded rows: it says which rows are padding.
        """
        self._by_row = self._by_position = None if scores is None else scores.detach()
        if scores is not None and document_ids is not None:
            real_first = (document_ids < 0).to(torch.uint8).argsort(dim=1, stable=True)
            self._by_position = scores.detach().gather(2, real_first[:, None].expand(-1, scores.shape[1], -1))

    def score_rows(
        self, key: Tensor, value: Tensor, hidden: Tensor | None, position: Tensor, document_ids: Tensor | None
    ) -> Tensor:
        scores = self._require(self._by_row)
        if scores.shape != key.shape[:3]:
            raise ValueError(
                f"the oracle was given scores of shape {tuple(scores.shape)}, but this forward has "
                f"{tuple(key.shape[:3])} [batch, KV heads, tokens]: call set_scores for each text"
            )
        return scores.to(key.device, self.dtype_for(key))

    def score_step(
        self, state: dict[str, Tensor], new: Tokens, waiting: Tokens | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        scores = self._require(self._by_position).to(new.key.device, self.dtype_for(new.key))
        beyond = new.valid & (new.position >= scores.shape[2])
        if scores.shape[0] != new.key.shape[0] or bool(beyond.any()):
            raise ValueError(
                f"the oracle knows {scores.shape[0]} texts of {scores.shape[2]} tokens and was asked about a "
                "token outside them: call set_scores with the whole text first"
            )
        place = new.position.clamp(0, scores.shape[2] - 1)[:, None].expand(-1, scores.shape[1], -1)
        return scores.gather(2, place), state

    @staticmethod
    def _require(scores: Tensor | None) -> Tensor:
        if scores is None:
            raise ValueError(
                "the oracle has no scores: call set_scores with the future-attention target of the text"
            )
        return scores


register_scorer("oracle", OracleScorer)
register(PolicySpec("oracle", "oracle", "the future-attention target itself", sees_future=True))
