"""Throughput, memory and packing efficiency of preparing data: one line each, as JSON too with --out.

    python benchmarks/data_packing.py [--tokenizer PATH] [--documents 4000] [--procedural 200] [--out FILE]

`nemotron-like`: a JSONL of chats whose lengths are log-normal (median 5000 tokens, sigma 0.9, at most 16384),
packed into rows of 16384. `procedural`: documents of 300 to 4000 tokens in rows of 4096. One process, so the
figures are per core.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kvpop_lightning.config.schema import DataConfig
from kvpop_lightning.data import families
from kvpop_lightning.data.prepare import prepare
from kvpop_lightning.data.rows import PackedRows


def nemotron_like(
    path: Path, documents: int, tokenizer: Any, median: float = 5000.0, sigma: float = 0.9
) -> None:
    """Writes the file; its text is that of the families, cut and joined to the lengths wanted (log-normal,
    `median` in tokens)."""
    rng = random.Random(0)
    names = families.available()
    texts = [families.generate(name, seed, 60).solution for name in names for seed in range(4)]
    per_token = sum(map(len, texts)) / sum(len(tokenizer(text)["input_ids"]) for text in texts)
    with path.open("w") as stream:
        for index in range(documents):
            tokens = min(15000, rng.lognormvariate(math.log(median), sigma))
            text = ""
            while len(text) < tokens * per_token:
                text += rng.choice(texts) + "\n"
            text = text[: int(tokens * per_token)]
            stream.write(json.dumps({"problem": f"Problem {index}?", "solution": text}) + "\n")


def measure(name: str, config: DataConfig, tokenizer: Any) -> dict[str, Any]:
    """Prepares the training split and reports."""
    began, cpu = time.perf_counter(), time.process_time()
    prepared = prepare(config, tokenizer, splits=("train",), progress=False)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    index = PackedRows(prepared.folder / "train").index
    return {
        "name": name,
        "documents": index["counts"]["documents"],
        "rows": index["rows"],
        "tokens": index["tokens"],
        "packing_efficiency": round(index["packing_efficiency"], 4),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "tokens_per_cpu_second": round(index["tokens"] / cpu),
        "documents_per_cpu_second": round(index["counts"]["documents"] / cpu, 1),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", help="folder or hub id; default: SmolLM2 of the demo")
    parser.add_argument("--documents", type=int, default=4000)
    parser.add_argument("--procedural", type=int, default=200, help="rows of 4096 tokens")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = arguments.tokenizer
    if folder is None:
        from kvpop_lightning.models.smollm2 import smollm2_folder

        folder = str(smollm2_folder())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for number in (arguments.documents // 4, arguments.documents):  # memory must not grow with the file
            file = place / f"{number}.jsonl"
            nemotron_like(file, number, tokenizer)
            config = DataConfig(
                source="jsonl", path=str(file), eval_share=0.0, row_length=16384, train_rows=10**9,
                max_tokens=16384, too_long="drop", cache_dir=str(place / "cache"),
            )  # fmt: skip
            results.append(measure(f"nemotron-like {number}", config, tokenizer))
            print(json.dumps(results[-1]), flush=True)
        config = DataConfig(
            row_length=4096, train_rows=arguments.procedural, max_document_tokens=4000, cache_dir=str(place)
        )
        results.append(measure("procedural", config, tokenizer))
        print(json.dumps(results[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
