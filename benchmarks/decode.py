"""The step kernels on a GPU: correctness, tiles and launches (`kvpop bench decode` compares policies).

`PYTHONPATH=. python benchmarks/decode.py OUT.json [check] [tune] [time] [dense] [engine] [generate]`; weights
are random, of the shapes of Qwen3-4B. The generated length is set by the rows' position counters: slots full,
as after that many tokens; nothing in a step depends on the length otherwise, and `steps` real steps run from
there. `engine` and `generate` really write tokens, through the engine, sampling included, and run when they
are named: `engine` some thousands in several ways of sampling, `generate` one text for minutes.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from kvpop_lightning import BoundedCache, retrofit
from kvpop_lightning.cache.step_state import StepState
from kvpop_lightning.cache.triton_step import Launch
from kvpop_lightning.generation import Engine, Sampling
from kvpop_lightning.generation.bench.models import qwen3_4b
from kvpop_lightning.generation.bench.states import filled_state, move_to
from kvpop_lightning.generation.bench.timing import replay_times
from kvpop_lightning.generation.fused import FusedDecoder, Options, Tiles, capture
from kvpop_lightning.models.tiny import tiny_model
from kvpop_lightning.policy import Budget

BUDGET = Budget(4, 256, 3836)
LENGTHS = (4096, 16384, 32768, 65536, 131072)


def check() -> dict[str, Any]:
    """Kernels against the plain cache over 600 steps; fused models against the library's logits."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "generation"))
    from step_cases import compare_steps, make_policy

    found: dict[str, Any] = {}
    budget = Budget(3, 16, 60)
    cases = [
        ("mlp", {"width": 16}, 1, False), ("mlp", {"width": 16}, 3, True), ("mlp", {"width": 64}, 4, False),
        ("mlstm", {"memory_dim": 8, "value_dim": 16, "width": 16}, 4, False),
        ("mlstm", {"memory_dim": 8, "value_dim": 16, "width": 16, "delay": 5}, 3, False),
        ("streaming_llm", {}, 4, True), ("random", {}, 3, False), ("key_norm", {}, 4, False), ("linear", {},
        1, False),
    ]  # fmt: skip
    for number, (scorer, options, group, ties) in enumerate(cases):
        decay = 1.0 if scorer == "streaming_llm" else 0.8
        policy = make_policy(scorer, budget, layers=1, heads=2, dim=32, decay=decay, **options)
        with torch.no_grad():
            found[f"{number} {scorer} G{group} ties={ties} {options.get('delay', '')}"] = compare_steps(
                policy, rows=3, group=group, dim=32, steps=600 if number in (0, 1, 3) else 150,
                prompt=0 if number == 0 else 40,
                device="cuda", ties=ties, splits=(1, 3, 0)[number % 3], block=32, check_every=10,
            )  # fmt: skip
    for family in ("llama", "qwen3", "mistral"):
        for rows in (1, 3):
            found[f"{family} rows {rows}"] = logits_difference(family, rows, "mlp" if rows == 1 else "mlstm")
    return found


@torch.no_grad()
def logits_difference(family: str, rows: int, scorer: str, steps: int = 60) -> dict[str, float]:
    """Largest |difference| of logits, fused step in a CUDA graph against the library with BoundedCache."""
    model = tiny_model(family, layers=3, kv_heads=2, group=3, head_dim=32, hidden_size=96).cuda()
    model = retrofit(model, Budget(2, 8, 30), scorer=scorer, width=16)
    policy = model.kvpop
    state = StepState.empty(
        policy.budget, layers=3, rows=rows, heads=2, head_dim=32, dtype=torch.float32, device="cuda",
        memory=policy.layer_scorer(0).init_state(1, "cuda"),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    caches = []
    for row in range(rows):
        caches.append(BoundedCache(model))
        ids = torch.randint(3, 270, (1, 50 + 9 * row), generator=generator).cuda()
        model(ids, past_key_values=caches[-1], use_cache=True)
        state.take_over(row, caches[-1])
    decoder = FusedDecoder(model, state, policy, options=Options(launch=Launch(block=32, splits=2)))
    graph = capture(decoder)
    worst = largest = 0.0
    for _ in range(steps):
        token = torch.randint(3, 270, (rows,), generator=generator).cuda()
        decoder.token.copy_(token)
        graph.replay()
        for row in range(rows):
            logits = model(token[row : row + 1, None], past_key_values=caches[row], use_cache=True).logits[
                0, -1
            ]
            worst = max(worst, float((logits - decoder.logits[row]).abs().max()))
            largest = max(largest, float(logits.abs().max()))
    return {"worst": worst, "largest_logit": largest}


def tile_time(name: str, weights: list[Any], norm: Any, rows: int, block: int, warps: int) -> float:
    """Milliseconds a launch of one matrix-vector product, over the weights of all layers in turn."""
    import triton

    from kvpop_lightning.generation.triton_linear import gated_kernel, vector_kernel

    out, width = weights[0].shape
    x = torch.randn(1, width, device="cuda", dtype=torch.bfloat16)
    y = torch.zeros(1, out, device="cuda", dtype=torch.float32 if name == "head" else torch.bfloat16)

    def launch(w: Any) -> None:
        if name == "gated":
            half = w.shape[0] // 2
            gated_kernel[(triton.cdiv(half, rows),)](
                x, w[:half], w[half:], norm, y, 1e-6, OUT=half, IN=width, ROWS=rows, BLOCK=block,
                PDL=False, num_warps=warps,
            )  # fmt: skip
        else:
            has_norm = name in ("qkv", "head")
            vector_kernel[(triton.cdiv(out, rows),)](
                x, w, norm if has_norm else x, y, 1e-6, OUT=out, IN=width, ROWS=rows, BLOCK=block,
                HAS_NORM=has_norm, RESIDUAL=name in ("output", "down"), PDL=False, num_warps=warps,
            )  # fmt: skip

    launch(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for w in weights:
            launch(w)
    return replay_times(graph, 10)["median_ms"] / len(weights)


def tune(model: Any) -> dict[str, Any]:
    """Each matrix-vector product over all layers, microseconds a launch and TB/s, per tile."""
    decoder = FusedDecoder(model, filled_state(model, Budget(1, 64, 1), 1, 100, None), None)
    found: dict[str, Any] = {}
    shapes = {"qkv": "qkv", "output": "output", "gated": "gate_up", "down": "down", "head": None}
    for name, attribute in shapes.items():
        weights = [decoder.head] if attribute is None else [getattr(x, attribute) for x in decoder.layers]
        best: dict[str, float] = {}
        for rows, block, warps in (
            (1, 512, 1), (1, 1024, 4), (2, 512, 2), (2, 1024, 4), (4, 512, 2), (4, 512, 4), (4, 1024, 8),
            (8, 256, 4), (8, 512, 4), (8, 512, 8), (16, 256, 4), (16, 256, 8), (2, 2048, 4),
        ):  # fmt: skip
            ms = tile_time(name, weights, decoder.final_norm, rows, block, warps)
            best[f"{rows}x{block}w{warps}"] = round(1000 * ms, 2)
        ranked = sorted(best.items(), key=lambda item: item[1])
        tb = weights[0].nbytes / ranked[0][1] / 1e6
        found[name] = {"us": dict(ranked), "best_tb_s": round(tb, 2)}
        print(name, ranked[:4], round(tb, 2), "TB/s", flush=True)
        key = ranked[0][0]
        tile = (int(key.split("x")[0]), int(key.split("x")[1].split("w")[0]), int(key.split("w")[1]))
        found[name]["tile"] = tile
    return found


def measure(
    model: Any, policy: Any, budget: Budget, rows: int, lengths: Any, options: Options, steps: int = 60
) -> Any:
    """Latency by length, with the peak memory of those steps."""
    state = filled_state(model, budget, rows, lengths[0], policy)
    decoder = FusedDecoder(model, state, policy, options=options)
    graph = capture(decoder)
    results = []
    for length in lengths:
        move_to(state, length, policy)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        one = replay_times(graph, steps)
        one |= {"seen": length, "rows": rows, "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3)}
        one["tokens_per_s"] = round(1000 * rows / one["mean_ms"])
        one["finite"] = bool(torch.isfinite(decoder.logits).all())
        results.append(one)
    return results


SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "temperature 0.8, min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
}


def engine_times(model: Any, slots: int, tokens: int, warmup: int = 64) -> dict[str, float]:
    """Milliseconds a step of the engine with all slots at work, by way of sampling."""
    engine, found = Engine(model, slots=slots), {}
    for name, ways in SAMPLINGS.items():
        settings = Sampling(max_new_tokens=warmup + tokens, ignore_eos=True, **ways)  # type: ignore[arg-type]
        for number in range(slots):
            engine.submit([3, 4, 5 + number], settings)
        started, steps = 0.0, 0
        while engine.busy:
            if steps == warmup:
                started = time.perf_counter()
            engine.step()
            steps += 1
        found[name] = round(1000 * (time.perf_counter() - started) / (steps - warmup), 4)
    return found


def generate(model: Any, keep: Any, tokens: int = 131072, block: int = 8192) -> dict[str, Any]:
    """One text from its first token to `tokens`, through the engine: ms a token and peak memory by block.

    Sampling and the engine's own work count. `keep` is called with what was found after each block.
    """
    engine = Engine(model, slots=1)
    settings = Sampling(max_new_tokens=tokens, temperature=1.0, seed=0, ignore_eos=True)
    found: dict[str, Any] = {"policy": model.kvpop.name, "blocks": []}
    torch.cuda.reset_peak_memory_stats()
    started = last = time.perf_counter()
    for number, piece in enumerate(engine.stream([3, 4, 5], settings), start=1):
        if number % block and not piece.completion.finish:
            continue
        now = time.perf_counter()
        found["blocks"].append(
            {
                "tokens": number,
                "ms_a_token": round(1000 * (now - last) / ((number - 1) % block + 1), 4),
                "peak_bytes": torch.cuda.max_memory_allocated(),
                "allocated_bytes": torch.cuda.memory_allocated(),
            }
        )
        found["seconds"] = round(now - started, 1)
        keep(found)
        last = time.perf_counter()
    return found


def main() -> None:
    out = Path(sys.argv[1])
    wanted = set(sys.argv[2:]) or {"check", "tune", "time", "dense"}
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "budget": str(BUDGET),
    }
    started = time.time()

    def section(name: str, work: Any) -> Any:
        try:
            report[name] = work()
        except Exception:
            report[name] = {"error": traceback.format_exc()[-900:]}
        shown = json.dumps(report[name])
        print(
            f"[{time.time() - started:.0f} s] {name}: {shown[-250:] if 'error' in shown else shown[:900]}",
            flush=True,
        )
        out.write_text(json.dumps(report, indent=1))
        torch.cuda.empty_cache()
        return report[name]

    if "check" in wanted:
        section("check", check)
    model = qwen3_4b()
    tiles = Tiles()
    if "tune" in wanted:
        tuned = section("tune", lambda: tune(model))
        if "error" not in tuned:
            tiles = Tiles(**{name: found["tile"] for name, found in tuned.items()})
    if "time" in wanted:
        retrofit(model, BUDGET, scorer="mlp")
        policy = model.kvpop

        def variant(**launch: Any) -> Options:
            return Options(launch=Launch(**launch), tiles=tiles)

        short = (4096,)
        best = (1e9, {})
        for launch in ({}, {"splits": 16}, {"splits": 32}, {"splits": 64, "block": 64}, {"splits": 32,
        "block": 128},
                       {"splits": 32, "pdl": True}):  # fmt: skip
            got = section(
                f"b1 {launch}",
                lambda chosen=launch: measure(model, policy, BUDGET, 1, short, variant(**chosen)),
            )
            if isinstance(got, list) and got[0]["median_ms"] < best[0]:
                best = (got[0]["median_ms"], launch)
        section("kvpop_mlp b1", lambda: measure(model, policy, BUDGET, 1, LENGTHS, variant(**best[1]), 200))
        section("kvpop_mlp b8", lambda: measure(model, policy, BUDGET, 8, LENGTHS, variant()))
        for launch in (
            {"splits": 1},
            {"splits": 2},
            {"splits": 1, "block": 128},
            {"splits": 2, "attend_warps": 8, "block": 128},
        ):
            section(
                f"b64 {launch}",
                lambda chosen=launch: measure(model, policy, BUDGET, 64, short, variant(**chosen), 20),
            )
        retrofit(model, BUDGET, scorer="mlstm", match_bytes=True)
        section(
            "kvpop_mlstm b1",
            lambda: measure(model, model.kvpop, model.kvpop.budget, 1, LENGTHS, variant(**best[1])),
        )
        retrofit(model, BUDGET, policy="streaming_llm")
        section(
            "streaming_llm b1", lambda: measure(model, model.kvpop, BUDGET, 1, LENGTHS, variant(**best[1]))
        )
    if "engine" in wanted:
        retrofit(model, BUDGET, scorer="mlp")
        for slots, tokens in ((1, 1000), (8, 500), (64, 150)):
            section(f"engine b{slots}", lambda s=slots, n=tokens: engine_times(model, s, n))
    if "generate" in wanted:

        def keep(found: dict[str, Any]) -> None:
            report["generate"] = found
            out.write_text(json.dumps(report, indent=1))

        retrofit(model, BUDGET, scorer="mlp")
        section("generate", lambda: generate(model, keep))
    if "dense" in wanted:
        for length in LENGTHS:
            full = Budget(0, length + 512, 1)
            section(
                f"full b1 {length}",
                lambda full=full, length=length: measure(
                    model, None, full, 1, (length,), Options(tiles=tiles)
                ),
            )


if __name__ == "__main__":
    main()
