"""A small byte-level tokenizer trained on the families' own text, with and without a chat template."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from kvpop_lightning.config.schema import DataConfig

sys.path.insert(0, str(Path(__file__).parent))

from small_tokenizer import CHATML, build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(CHATML)


@pytest.fixture(scope="session")
def plain_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(None)


@pytest.fixture
def config(tmp_path) -> DataConfig:
    """Small rows, so that a data set takes a fraction of a second."""
    return DataConfig(
        families=["ledger", "codebook", "long_division"],
        eval_families=["road_trips"],
        row_length=256,
        train_rows=11,
        eval_rows=2,
        min_document_tokens=80,
        max_document_tokens=300,
        cache_dir=str(tmp_path / "cache"),
    )
