"""Key norm: keys of low norm are kept (Devoto et al., 2024; docs/baselines.md)."""

from __future__ import annotations

from torch import Tensor

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.scorers import Scorer, register_scorer


class KeyNormScorer(Scorer):
    """Score `-||k||`, in the key's own units; with decay one unit of norm is traded against one nat."""

    kind = "key_norm"

    def score_rows(
        self, key: Tensor, value: Tensor, hidden: Tensor | None, position: Tensor, document_ids: Tensor | None
    ) -> Tensor:
        return -key.to(self.dtype_for(key)).norm(dim=-1)


register_scorer("key_norm", KeyNormScorer)
register(PolicySpec("key_norm", "key_norm", "keys of lowest norm", may_decay=True))
