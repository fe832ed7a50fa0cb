"""Small random models of the supported families, with a byte tokenizer: for tests and dry runs, no
download.
"""

from __future__ import annotations

from typing import Any

import torch

from kvpop_lightning.errors import UserError

FAMILIES = ("llama", "qwen3", "mistral")
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(
    family: str = "llama",
    *,
    layers: int = 2,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    hidden_size: int = 48,
    vocab_size: int = 272,
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Any:
    """A random causal model of `family` (`llama`, `qwen3` or `mistral`), in evaluation mode.

    Args:
        kv_heads, group: KV heads, and query heads that share each.
        tied: input embeddings serve as output head.
        seed: of the weights; the global random state is left alone.
        config: further fields of the family's configuration.

    Raises:
        UserError: unknown family.
    """
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (LlamaConfig, LlamaForCausalLM, {}),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
        "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    }
    if family not in kinds:
        raise UserError(
            f"model.source tiny-{family} is unknown: use {', '.join('tiny-' + f for f in FAMILIES)}"
        )
    make_config, make_model, extra = kinds[family]
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        # Larger than usual, so that what is evicted matters and logits are not all alike.
        "initializer_range": 0.2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(make_config(**settings | extra | config))
    return model.to(dtype).eval()


def tiny_tokenizer() -> Any:
    """One token per UTF-8 byte and three special ones (ids 0 to 2: padding, start and end of a turn),
    ChatML.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *alphabet))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=_SPECIAL[0],
        bos_token=_SPECIAL[1],
        eos_token=_SPECIAL[2],
        chat_template=_CHAT_TEMPLATE,
        padding_side="left",
    )
