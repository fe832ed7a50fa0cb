"""What trained scorers keep of text: scores of SmolLM2's KV heads, for `training_attention.py --patterns`.

    python benchmarks/attention_patterns.py RUN/policy/kvpop_mlp OUT.safetensors [--documents 16]

Runs SmolLM2 with a trained policy (of `make demo`) over long held-out documents, in its parallel sparse
forward at `--budget` keys, and keeps the scores of eight (layer, KV head) pairs spread over the model:
float32 [8, documents, tokens], and beside them how the policy decays.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvpop_lightning.config.schema import DataConfig, ModelConfig
from kvpop_lightning.data import PackedMathDataModule
from kvpop_lightning.models import LayerObservation, load, load_model, observe
from kvpop_lightning.policy import Budget
from kvpop_lightning.training.forward import collate, last_hidden, to_device

PAIRS = tuple((layer, layer % 3) for layer in (0, 4, 8, 13, 17, 21, 25, 29))
"""(layer, KV head): first to last layer, every head."""


def long_documents(tokenizer: object, count: int, length: int) -> list[dict[str, Tensor]]:
    """Held-out rows of one document each, from families that no training of the demo saw."""
    config = DataConfig(row_length=length, train_rows=1, eval_rows=count, max_document_tokens=length)
    data = PackedMathDataModule(config, tokenizer)
    data.prepare_data()
    data.setup("validate")
    return [data.eval_rows[row] for row in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--budget", type=int, default=1024)
    options = parser.parse_args()
    model, tokenizer = load_model(ModelConfig())
    rows = long_documents(tokenizer, options.documents, options.length)
    model = load(options.policy, base=model).eval()
    policy = model.kvpop
    trained = policy.budget.total
    # More slots hold a token longer: the decay's rate falls with them, as in the comparison of policies.
    policy.decay.pow_(trained / options.budget)
    policy.budget = Budget(4, 256, options.budget - 260)
    kept: dict[int, list[Tensor]] = {number: [] for number in range(len(PAIRS))}

    def keep(seen: LayerObservation) -> None:
        assert seen.score is not None
        for number, (layer, head) in enumerate(PAIRS):
            if layer == seen.layer:
                kept[number].append(seen.score[0, head].float().cpu())

    for number, row in enumerate(rows):
        started = time.time()
        with torch.no_grad(), observe(model, keep):
            last_hidden(model, to_device(collate([row]), model.device))
        print(f"document {number + 1} of {len(rows)}: {time.time() - started:.0f} s", flush=True)
    scores = torch.stack([torch.stack(kept[number]) for number in range(len(PAIRS))])
    decay = [float(policy.decay[layer, head]) for layer, head in PAIRS]
    about = {
        "policy": policy.name,
        "pairs": PAIRS,
        "decay": decay,
        "decay_step": policy.decay_step,
        "budget": options.budget,
    }
    save_file({"scores": scores}, options.out, metadata={"about": json.dumps(about)})


if __name__ == "__main__":
    main()
