"""Tiny retrofitted models and packed rows for the training tests."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvpop_lightning import retrofit
from kvpop_lightning.policy import Budget

LAYERS, KV_HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 3, 2, 8, 32, 61
ROW_LENGTH = 48
BUDGET = Budget(2, 4, 6)


def _base() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        initializer_range=0.3,  # attention far from uniform, so that targets differ between tokens
    )
    return LlamaForCausalLM(config)


def row(number: int, *, padding: int = 0, seed: int = 100) -> dict[str, torch.Tensor]:
    """One packed row: two documents of different length, each with a prompt, `padding` at the end."""
    generator = torch.Generator().manual_seed(seed + number)
    cut = 14 + 5 * (number % 4)
    document_ids = torch.zeros(ROW_LENGTH, dtype=torch.int64)
    document_ids[cut:] = 1
    position_ids = torch.arange(ROW_LENGTH)
    position_ids[cut:] -= cut
    if padding:
        document_ids[-padding:], position_ids[-padding:] = -1, 0
    loss_mask = (position_ids > 4) & (document_ids >= 0)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (ROW_LENGTH,), generator=generator),
        "position_ids": position_ids,
        "document_ids": document_ids,
        "loss_mask": loss_mask,
        "row": torch.tensor(number),
    }


class Rows(torch.utils.data.Dataset):
    """`count` rows; every third one is padded, the more the higher its number."""

    def __init__(self, count: int = 6) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return row(index, padding=3 * index if index % 3 == 2 else 0)


_BASE = _base()


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def make_model():
    """A factory of equal retrofitted models; keyword arguments go to `retrofit`."""

    def make(policy: str = "kvpop_mlp", budget: Budget = BUDGET, **options: Any) -> Any:
        options = {"decay": 0.8, "decay_step": 5, "width": 8, "memory_dim": 4, "value_dim": 4, **options}
        return retrofit(copy.deepcopy(_BASE), budget, policy=policy, **options)

    return make


@pytest.fixture
def plain_model() -> Any:
    return copy.deepcopy(_BASE)
