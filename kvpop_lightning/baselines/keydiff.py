"""KeyDiff: keys most unlike the mean normalised key stay (Park et al., 2025; docs/baselines.md)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

from kvpop_lightning.baselines.registry import PolicySpec, register
from kvpop_lightning.policy.scorers import register_scorer
from kvpop_lightning.policy.stepwise import EMPTY, Held, StepwiseRule


class KeyDiff(StepwiseRule):
    """Drops the held key of highest cosine similarity to the mean of all held keys, each normalised.

    The mean is taken anew at every drop over what the KV head holds, sinks and window included. KVpop's sinks
    and window are protected (METHOD.md, section 7).
    """

    kind = "keydiff"

    def value_of(self, held: Held, newest: Tensor) -> Tensor:
        keys = None if held.derived is None else held.derived.get("unit")
        if keys is None:
            keys = normalize(held.keys.to(self.dtype_for(held.keys)), dim=-1)
            if held.derived is not None:
                held.derived["unit"] = keys
        there = (held.position != EMPTY).to(keys.dtype)[:, :, None]
        # The mean's length does not matter.
        return -(keys * normalize(there @ keys, dim=-1)).sum(-1)


register_scorer("keydiff", KeyDiff)
register(PolicySpec("keydiff", "keydiff", "keys most unlike the mean held key"))
