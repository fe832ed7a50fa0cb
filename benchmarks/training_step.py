"""A whole training step of KVpop against plain distillation with a dense student, on one GPU.

    python benchmarks/training_step.py [--json FILE] [--length 32768] [--layers 2 4] [--tiny]

Qwen3-4B's layers (hidden size 2560, 32 query and 8 KV heads of 128, feed-forward 9728) and vocabulary with
random weights, base trained in bf16-mixed, 4096 keys per KV head, one row of one document: the framework's
own `StudentModule` under a Trainer, optimiser included. The dense student runs the same distillation without
scorers, on PyTorch's fastest dense attention. Only some layers fit one GPU without recomputation; two depths
give the time of a layer and of the rest (vocabulary, optimiser), and from them that of 36 layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen3Config

from kvpop_lightning import Budget, retrofit
from kvpop_lightning.config.schema import Config, DistillConfig, TargetConfig, TrainerConfig
from kvpop_lightning.models import dense
from kvpop_lightning.training.forward import Batch, last_hidden
from kvpop_lightning.training.module import Metrics
from kvpop_lightning.training.runtime import build_trainer, quiet_lightning
from kvpop_lightning.training.student import StudentModule

FULL_DEPTH = 36
BUDGET = Budget(4, 256, 3836)
SIZES = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
TINY_BUDGET = Budget(2, 8, 22)
TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 300,
}  # fmt: skip


class DenseStudent(StudentModule):
    """Distillation as without KVpop: the student attends to everything, nothing is scored."""

    def share(self, batch: Batch, totals: Tensor) -> tuple[Tensor, Metrics]:
        teacher = self._teacher[0]
        with torch.no_grad(), dense(teacher):
            teacher_hidden = last_hidden(teacher, batch)
        with dense(self.model):
            hidden = last_hidden(self.model, batch)
        kl = self._kl(hidden, teacher_hidden, batch) / totals[-1].clamp(min=1)
        return kl, {"kl": kl}


@dataclass(frozen=True)
class Variant:
    """What is trained."""

    policy: str
    module: Callable[..., StudentModule] = StudentModule
    target: TargetConfig = field(default_factory=TargetConfig)
    options: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "dense student": Variant("streaming_llm", DenseStudent),
    "sparse student alone": Variant("streaming_llm"),
    "kvpop_mlp": Variant("kvpop_mlp"),
    "kvpop_mlp, the student's own normaliser": Variant(
        "kvpop_mlp", target=TargetConfig(source="student", normalizer="sparse")
    ),
    "kvpop_mlstm, the student's own normaliser": Variant(
        "kvpop_mlstm", target=TargetConfig(source="student", normalizer="sparse"), options={"delay": None}
    ),
}
"""`kvpop_mlp` takes its target from the student's queries and keys under their dense normaliser (the
default), the next ones under that of the student's sparse attention (the paper)."""


class StepTimes(pl.Callback):
    """Seconds of every step, the GPU's work included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        _wait()
        self._began = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        _wait()
        self.seconds.append(time.perf_counter() - self._began)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def row(length: int, vocabulary: int, device: str) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, length), generator=generator)
    whole = {
        "input_ids": ids,
        "position_ids": torch.arange(length)[None],
        "document_ids": torch.zeros_like(ids),
        "loss_mask": torch.ones_like(ids, dtype=torch.bool),
        "row": torch.zeros(1, dtype=torch.int64),
    }
    return {name: tensor.to(device) for name, tensor in whole.items()}


def measure(variant: Variant, layers: int, length: int, tiny: bool, steps: int) -> dict[str, float]:
    """Median milliseconds of a step after two to warm up, and the peak memory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = TINY if tiny else SIZES
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            Qwen3Config(num_hidden_layers=layers, tie_word_embeddings=True, **sizes), dtype=torch.float32
        )
    model = retrofit(model, TINY_BUDGET if tiny else BUDGET, policy=variant.policy, **variant.options).train()
    trainer_config = TrainerConfig(base="full", max_steps=steps + 2, log_every=10**6, progress=False)
    config = replace(Config(), trainer=trainer_config)
    module = variant.module(model, DistillConfig(target=variant.target), trainer_config)
    times = StepTimes()
    precision = "bf16-mixed" if device == "cuda" else "32-true"
    trainer = build_trainer(config, torch.device(device), [times], logger=None, precision=precision)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rows = [row(length, sizes["vocab_size"], device)] * (steps + 2)
    with quiet_lightning():
        trainer.fit(module, train_dataloaders=DataLoader(rows, batch_size=None))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {"ms": 1e3 * sorted(times.seconds[2:])[steps // 2], "peak_gib": peak}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--layers", type=int, nargs=2, default=[2, 4])
    parser.add_argument("--steps", type=int, default=3, help="measured, after two others")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on any device: does it run?")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.tiny:
        print("needs a CUDA device (or --tiny)", file=sys.stderr)
        return 2
    few, many = options.layers
    found: dict[str, dict[str, float]] = {}
    for name, variant in VARIANTS.items():
        times = {}
        for layers in (few, many):
            result = measure(variant, layers, options.length, options.tiny, options.steps)
            times[layers] = result["ms"]
            gc.collect()
            torch.cuda.empty_cache()
        layer = (times[many] - times[few]) / (many - few)
        rest = times[few] - few * layer
        found[name] = {
            f"ms_{few}_layers": times[few],
            f"ms_{many}_layers": times[many],
            "ms_per_layer": layer,
            "ms_rest": rest,
            f"ms_{FULL_DEPTH}_layers": rest + FULL_DEPTH * layer,
            f"peak_gib_{many}_layers": result["peak_gib"],
        }
        base = found["dense student"]
        for key in (f"ms_{many}_layers", "ms_per_layer", f"ms_{FULL_DEPTH}_layers"):
            found[name][key.replace("ms_", "ratio_", 1)] = found[name][key] / base[key]
        print(name, {key: round(value, 3) for key, value in found[name].items()}, flush=True)
    if options.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        about = {"device": device, "tokens": options.length, "budget": BUDGET.total, "shapes": SIZES}
        options.json.write_text(json.dumps({**about, "steps": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
