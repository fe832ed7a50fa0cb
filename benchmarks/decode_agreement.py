"""SmolLM2's real weights: engine, library and parallel forward compared (docs/decode_agreement.json).

`PYTHONPATH=. python benchmarks/decode_agreement.py OUT.json [cpu|cuda] [tokens] [generated]`
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "generation"))

from agreement_cases import batch_against_alone, held_out, long_generation, teacher_forced, with_scorer

from kvpop_lightning.config.schema import ModelConfig
from kvpop_lightning.models import load_model


def main() -> None:
    out = Path(sys.argv[1])
    device = sys.argv[2] if len(sys.argv) > 2 else "auto"
    tokens, generated = (int(word) for word in (*sys.argv[3:5], *("2000", "7000")[len(sys.argv[3:5]) :]))
    model, tokenizer = load_model(ModelConfig(device=device, dtype="float32"))
    cuda = model.device.type == "cuda"
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__,
    }  # fmt: skip
    ids = held_out(tokenizer, tokens).to(model.device)
    for scorer, options in (("mlp", {}), ("mlstm", {"memory_dim": 8, "value_dim": 16})):
        with_scorer(model, tokenizer, scorer, **options)
        for backend in ("graph", "plain") if cuda else ("plain",):
            parts: dict[str, Callable[[], Any]] = {
                "teacher_forced": lambda b=backend: teacher_forced(model, ids, b),
                "batch": lambda b=backend: batch_against_alone(model, ids, b),
            }
            if backend == "graph" or not cuda:
                parts["long"] = lambda b=backend: long_generation(model, ids, b, generated)
            found = report.setdefault(f"{scorer} {backend}", {})
            for part, work in parts.items():
                started = time.time()
                found[part] = work()
                print(f"{scorer} {backend} {part}: {time.time() - started:.0f} s {found[part]}", flush=True)
                out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
