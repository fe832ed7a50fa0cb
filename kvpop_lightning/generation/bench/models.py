"""Models of random weights to measure on: time and memory depend on shapes, not on what the weights say."""

from __future__ import annotations

from typing import Any

import torch

from kvpop_lightning.models.tiny import tiny_model

QWEN3_4B: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip


def qwen3_4b(device: torch.device | str = "cuda") -> Any:
    """Qwen3-4B's shapes in bfloat16, random weights, made on the device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(Qwen3Config(**QWEN3_4B)).eval()
    finally:
        torch.set_default_dtype(before)


def tiny(device: torch.device | str = "cpu") -> Any:
    """Four layers of two KV heads: a step takes milliseconds on a CPU."""
    return tiny_model("qwen3", layers=4, head_dim=32, hidden_size=96, max_position_embeddings=65536).to(
        device
    )
