"""Models of the shipped configurations as their configuration alone: built on the meta device, without
weights or hub.
"""

from __future__ import annotations

from typing import Any

import torch

from kvpop_lightning.config.schema import ModelConfig
from kvpop_lightning.errors import UserError

# Published sizes (config.json of each repository).
_QWEN3 = {
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "Qwen/Qwen3-8B": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}


def build_on_meta(config: ModelConfig, *, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model that `config` names, without weights: shapes and memory can be checked before any download.

    Raises:
        UserError: `config.path` is not one of the known hub ids.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if config.path not in KNOWN:
        raise UserError(
            f"model.path {config.path!r} is not known without the hub: use one of {', '.join(KNOWN)}"
        )
    with torch.device("meta"):
        model: Any = Qwen3ForCausalLM(Qwen3Config(**KNOWN[config.path]))
    return model.to(dtype).eval()
