from __future__ import annotations

import pytest

from kvpop_lightning.data import families, sample_text
from kvpop_lightning.errors import UserError


@pytest.mark.parametrize("kind", ["ledger", "mixed", "held_out"])
def test_sample_text_has_the_length_asked_for(kind, tokenizer):
    text = sample_text(kind, 4, 500)
    assert text == sample_text(kind, 4, 500)
    assert text != sample_text(kind, 5, 500)
    assert len(tokenizer(text)["input_ids"]) >= 500
    exact = len(tokenizer(sample_text(kind, 4, 500, tokenizer))["input_ids"])
    assert 500 <= exact <= 800
    with pytest.raises(UserError, match="unknown problem family"):
        sample_text("poems", 0, 10)


def test_mixed_and_held_out_are_different_families():
    held_out = {
        sample_text("held_out", seed, 60)[:40] for seed in range(len(families.available(held_out=True)))
    }
    assert len(held_out) == len(families.available(held_out=True))
