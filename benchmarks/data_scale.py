"""Time and memory of preparing data sets of growing size, each in a process of its own.

    python benchmarks/data_scale.py procedural --rows 400 4000 19500 --folder /tmp/scale [--out FILE]
    python benchmarks/data_scale.py procedural --rows 2000 --processes 2 --folder /tmp/scale
    python benchmarks/data_scale.py jsonl --documents 1000 10000 50000 --folder /tmp/scale

`procedural`: documents of 300 to 4000 tokens of all families, short ones of reasoning_gym in the gaps, rows
of 4096. `jsonl`: a file of chats of about 800 tokens, rows of 4096. The process that prepares is watched from
outside, with those it starts: its memory and what it has written by then are noted after every shard, so that
one run shows whether memory grows. `--out` adds the results to a JSON file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

from data_packing import nemotron_like

from kvpop_lightning.config.schema import DataConfig, ModelConfig
from kvpop_lightning.data.fingerprint import describe, fingerprint
from kvpop_lightning.data.prepare import prepare
from kvpop_lightning.data.reasoning import FAMILY
from kvpop_lightning.data.rows import PackedRows
from kvpop_lightning.data.stats import split_stats
from kvpop_lightning.models.tokenizer import load_tokenizer


def work(config: DataConfig, answer: Any) -> None:
    """Prepares the training split in this process."""
    tokenizer = load_tokenizer(ModelConfig())
    began, cpu = time.perf_counter(), cpu_seconds()
    prepared = prepare(config, tokenizer, splits=("train",), progress=False)
    answer.send(
        {
            "seconds": round(time.perf_counter() - began, 1),
            "cpu_seconds": round(cpu_seconds() - cpu, 1),
            "folder": str(prepared.folder / "train"),
        }
    )


def cpu_seconds() -> float:
    """Of this process and the ended ones that it had started."""
    return sum(os.times()[:4])


def memory_mb(process: int) -> dict[str, int]:
    """Memory of a process and the processes it has started, in MB; empty once it is gone.

    `resident` and `peak`: of the process itself, now and at most so far; `all`: of all of them now, what they
    share counted once.
    """
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        found = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "VmHWM"))}
        memory = {"resident": int(found["VmRSS"]) // 1024, "peak": int(found["VmHWM"]) // 1024}
    except (OSError, KeyError):
        return {}
    return {**memory, "all": sum(proportional_kib(one) for one in family_of(process)) // 1024}


def family_of(process: int) -> list[int]:
    """The process and all that descend from it."""
    family = [process]
    for one in family:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                family += [int(child) for child in task.read_text().split()]
    return family


def proportional_kib(process: int) -> int:
    """Resident memory, each page divided by the number of processes that share it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def measure(name: str, config: DataConfig, tokenizer: Any) -> dict[str, Any]:
    """Prepares in a fresh process, watches it and reports."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=work, args=(config, there))
    progress = Path(config.cache_dir) / fingerprint(describe(config, tokenizer)) / "train.partial"
    began, shards, timeline = time.perf_counter(), 0, list[dict[str, int]]()
    peak = {"peak": 0, "all": 0}
    child.start()
    while child.is_alive():
        time.sleep(0.5)
        memory = memory_mb(child.pid or 0)
        peak = {key: max(most, memory.get(key, 0)) for key, most in peak.items()}
        try:
            state = json.loads((progress / "progress.json").read_text())
        except (OSError, json.JSONDecodeError):
            continue
        if len(state["shards"]) > shards and memory:
            shards = len(state["shards"])
            timeline.append(
                {
                    "documents": state["counts"]["documents"],
                    "seconds": round(time.perf_counter() - began),
                    "resident_mb": memory["resident"],
                    "peak_mb": memory["peak"],
                }
            )
            print(name, timeline[-1], flush=True)
    child.join()
    if child.exitcode != 0:
        raise SystemExit(f"{name}: the process ended with {child.exitcode}")
    result = here.recv()
    folder = Path(result.pop("folder"))
    rows = PackedRows(folder, verify=True)
    stats = split_stats(rows)
    return {
        "name": name,
        "documents": stats["documents"],
        "of_them_short_fillers": stats["mix"].get(FAMILY, {}).get("documents", 0),
        "rows": len(rows),
        "row_length": rows.row_length,
        "tokens": stats["tokens"],
        "lengths": stats["lengths"],
        "packing_efficiency": round(stats["packing_efficiency"], 4),
        **result,
        "documents_per_cpu_second": round(stats["documents"] / result["cpu_seconds"], 1),
        "tokens_per_cpu_second": round(stats["tokens"] / result["cpu_seconds"]),
        "disk_mb": round(sum(file.stat().st_size for file in folder.iterdir()) / 1e6, 1),
        "shards": len(rows.index["shards"]),
        "peak_mb": peak["peak"],
        "peak_mb_of_all_processes": peak["all"],
        "timeline": timeline,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", choices=("procedural", "jsonl"))
    parser.add_argument("--rows", type=int, nargs="+", default=[400], help="of 4096 tokens, for procedural")
    parser.add_argument("--documents", type=int, nargs="+", default=[1000], help="for jsonl")
    parser.add_argument("--folder", type=Path, required=True, help="for rows and files; 10 KB a document")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(ModelConfig())
    for size in arguments.rows if arguments.source == "procedural" else arguments.documents:
        cache = arguments.folder / f"{arguments.source}-{size}-{arguments.processes}"
        shared: dict[str, Any] = {"row_length": 4096, "cache_dir": str(cache)}
        if arguments.source == "procedural":
            config = DataConfig(
                train_rows=size, max_document_tokens=4000, processes=arguments.processes, **shared
            )
        else:
            file = arguments.folder / f"{size}.jsonl"
            nemotron_like(file, size, tokenizer, median=800, sigma=0.5)
            config = DataConfig(
                source="jsonl", path=str(file), eval_share=0.0, train_rows=10**9,
                processes=arguments.processes, **shared,
            )  # fmt: skip
        several = f", {arguments.processes} processes" if arguments.processes > 1 else ""
        result = measure(f"{arguments.source} {size}{several}", config, tokenizer)
        result["processes"] = arguments.processes
        print(json.dumps({**result, "timeline": "..."}), flush=True)
        if arguments.out:
            known = json.loads(arguments.out.read_text()) if arguments.out.is_file() else []
            arguments.out.write_text(json.dumps([*known, result], indent=1) + "\n")
        shutil.rmtree(cache)


if __name__ == "__main__":
    main()
