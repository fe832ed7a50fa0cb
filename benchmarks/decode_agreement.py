"""SmolLM2's real weights: engine, library and parallel forward compared (docs/decode_agreement.json).

`PYTHONPATH=. python benchmarks/decode_agreement.py OUT.json` runs everything one after the other; see
`--help` for parts of it, run side by side into files of their own, and `--join`, which puts those together.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "generation"))

import agreement_cases as cases
from invariant_checks import run_parallel

from kvpop_lightning.config.schema import ModelConfig
from kvpop_lightning.models import load_model

PARTS = ["engine", "library", "batch", "long"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--scorers", nargs="+", default=list(cases.SCORERS), choices=list(cases.SCORERS))
    parser.add_argument("--backends", nargs="+", choices=("graph", "plain"), help="default: what runs here")
    parser.add_argument("--tokens", type=int, default=2000, help="of held-out text")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="in this order")
    parser.add_argument("--generated", type=int, default=10_000, help="tokens on end")
    parser.add_argument("--new", type=int, default=64, help="tokens for each prompt of the batch")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument(
        "--until", type=float, help="seconds since the epoch at which token by token work ends"
    )
    parser.add_argument("--join", nargs="+", type=Path, help="only put these reports together")
    return parser.parse_args()


def measure(given: argparse.Namespace) -> None:
    if given.threads:
        torch.set_num_threads(given.threads)
    model, tokenizer = load_model(ModelConfig(device=given.device, dtype="float32"))
    cuda = model.device.type == "cuda"
    where = torch.cuda.get_device_name() if cuda else "cpu"
    report: dict[str, Any] = {"torch": torch.__version__, "budget": vars(cases.BUDGET), "parts": {}}
    ids = cases.held_out(tokenizer, given.tokens).to(model.device)

    def left() -> float:
        return 1e9 if given.until is None else max(given.until - time.time(), 1.0)

    for scorer in given.scorers:
        cases.with_scorer(model, tokenizer, scorer)
        runs: dict[str, Any] = {}

        def take(part: str, work: Callable[[], Any], scorer: str = scorer) -> None:
            started, name = time.time(), f"{scorer}, {where}, {part}"
            try:
                found = work()
            except Exception as error:  # one part that fails leaves the others
                found = {"error": f"{type(error).__name__}: {error}"}
            found |= {"seconds": round(time.time() - started, 1), "violations": cases.violations(name, found)}
            report["parts"][name] = found
            print(name, json.dumps(found), flush=True)
            given.out.write_text(json.dumps(report, indent=1) + "\n")

        def decoder(kind: str, work: Callable[[], Any], runs: dict[str, Any] = runs) -> dict[str, Any]:
            started = time.time()
            run = runs[kind] = work()
            each = (time.time() - started) / run.logits.shape[1]
            found = cases.against_parallel(model, ids, run, runs["parallel"])
            return found | {"ms_a_token": round(1000 * each, 2)}

        backends = given.backends or (["graph", "plain"] if cuda else ["plain"])
        if {"engine", "library"} & set(given.parts):
            runs["parallel"] = run_parallel(model, ids, None)
        work: dict[str, Callable[[str], Any]] = {
            "engine": lambda b: decoder(f"engine {b}", lambda: cases.by_engine(model, ids, b, left())),
            "batch": lambda b: cases.batch_against_alone(model, ids, b, given.new),
            "long": lambda b: cases.long_generation(model, ids, b, given.generated),
        }
        for part in given.parts:
            if part == "library":
                take("library", lambda: decoder("library", lambda: cases.by_generate(model, ids, left())))
                continue
            for backend in backends:
                take(f"{part} {backend}", partial(work[part], backend))
        for kind in [kind for kind in runs if kind.startswith("engine") and "library" in runs]:
            take(f"{kind} and library", partial(cases.between, runs[kind], runs["library"]))


def join(out: Path, parts: list[Path]) -> None:
    reports = [json.loads(path.read_text()) for path in parts]
    whole = reports[0] | {"parts": {name: one for each in reports for name, one in each["parts"].items()}}
    whole["torch"] = sorted({one["torch"] for one in reports})
    whole["violations"] = [line for one in whole["parts"].values() for line in one["violations"]]
    out.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(whole["violations"], indent=1))


if __name__ == "__main__":
    chosen = arguments()
    if chosen.join:
        join(chosen.out, chosen.join)
    else:
        measure(chosen)
