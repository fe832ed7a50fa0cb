"""The training-time machinery around attention, timed on a GPU: eviction times, the target pass, the scorer.

    python benchmarks/policy_kernels.py [--out docs/policy_kernels.json] [--tune] [--lengths 8192 32768 65536]

Attention shapes of Qwen3-4B: 32 query heads, 8 KV heads, D 128, bfloat16, budget 4096 (sink 4, window 256).
Every figure is the median of repeated runs in this process, in milliseconds, and stands beside the dense
forward of PyTorch's fused attention in the same run. `--tune` also times the kernels' other tile shapes.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench

from kvpop_lightning.policy import (
    Budget,
    dense_log_normalizer,
    eviction_time,
    future_attention_target,
    running_kth_best,
    teacher_decisions,
)
from kvpop_lightning.policy import triton_order as order
from kvpop_lightning.policy import triton_target as target
from kvpop_lightning.policy.scorers.mlstm import MLSTMScorer
from kvpop_lightning.policy.scorers.mlstm_chunkwise import mlstm_chunkwise
from kvpop_lightning.policy.scorers.mlstm_forms import mlstm_quadratic
from kvpop_lightning.policy.triton_stream import Tile

HEADS, KV_HEADS, DIM = 32, 8, 128
BUDGET = Budget(4, 256, 3836)
TILES = (
    Tile(128, 128, 8, 3, False), Tile(128, 128, 8, 3, True), Tile(128, 128, 4, 3, True),
    Tile(128, 64, 4, 3, True), Tile(128, 64, 4, 4, False), Tile(128, 64, 8, 4, True),
    Tile(64, 128, 4, 3, True), Tile(256, 64, 8, 3, True), Tile(256, 128, 8, 3, True),
    Tile(128, 256, 8, 2, True), Tile(64, 64, 4, 4, True),
)  # fmt: skip


def milliseconds(work: Callable[[], Any], *, repeat: int = 100) -> float:
    """Median; 0 where the work does not fit the card."""
    try:
        return round(float(do_bench(work, warmup=10, rep=repeat, return_mode="median")), 4)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        print(f"  not run: {str(error).splitlines()[0][:150]}", flush=True)
        return 0.0
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def graphed(work: Callable[[], Any]) -> Callable[[], None]:
    """The same work as a CUDA graph: what is left without the launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def peak_mib(work: Callable[[], Any]) -> float:
    """Device memory that the work takes beyond what was held before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def time_orders(length: int, tune: bool) -> dict[str, float]:
    """Eviction times, running k-th best and decisions, 8 heads."""
    priority = torch.randn(1, KV_HEADS, length, device="cuda", dtype=torch.float64)
    ids = (torch.arange(length, device="cuda") // 8192).unsqueeze(0)
    decayed = priority * 3 + 0.36 * (torch.arange(length, device="cuda") // 64)

    def triton(p: Tensor = priority) -> Tensor:
        return eviction_time(p, BUDGET, backend="triton")

    def eager() -> Tensor:
        return eviction_time(priority, BUDGET, backend="parallel")

    packed = Budget(4, 256, 764)
    found = {
        "sort of the priorities": milliseconds(lambda: priority.sort(dim=-1, stable=True)),
        "eviction times, triton": milliseconds(triton),
        "eviction times, triton, decayed": milliseconds(lambda: triton(decayed)),
        "eviction times, triton, documents": milliseconds(
            lambda: eviction_time(priority, packed, document_ids=ids, backend="triton")
        ),
        "eviction times, triton, CUDA graph": milliseconds(graphed(triton)),
        "eviction times, PyTorch": milliseconds(eager, repeat=50),
        "eviction times, PyTorch, CUDA graph": milliseconds(graphed(eager), repeat=50),
        "running k-th best, triton": milliseconds(
            lambda: running_kth_best(priority, BUDGET.topk, backend="triton")
        ),
        "teacher decisions, triton": milliseconds(
            lambda: teacher_decisions(priority, BUDGET, backend="triton")
        ),
        "eviction times, MiB": peak_mib(triton),
    }
    if tune:
        for chunk in (32, 64, 128):
            for walk in (512, 1024, 2048):
                order._WALK = walk
                found[f"eviction times, chunk {chunk}, walk {walk}"] = milliseconds(
                    graphed(
                        lambda chunk=chunk: order.eviction_time_triton(priority, BUDGET, None, chunk=chunk)
                    )
                )
        order._WALK = 1024
    return found


def time_targets(length: int, tune: bool) -> dict[str, float]:
    """The target pass under a given normaliser, the dense normaliser, and dense attention."""
    query = torch.randn(1, HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(1, KV_HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)
    value = torch.randn_like(key)
    arguments: dict[str, Any] = {"window": BUDGET.window, "aggregation": "max"}

    def dense() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    normalizer = dense_log_normalizer(query, key, backend="triton")

    def given(eps: float = 1e-9) -> Any:
        return future_attention_target(query, key, normalizer=normalizer, eps=eps, **arguments)

    found = {
        "dense attention forward": milliseconds(dense),
        "target, normaliser given": milliseconds(given),
        "target, normaliser given, log domain": milliseconds(lambda: given(0.0)),
        "dense normaliser": milliseconds(lambda: dense_log_normalizer(query, key)),
        "target, dense normaliser": milliseconds(lambda: future_attention_target(query, key, **arguments)),
        "target, MiB": peak_mib(given),
    }
    if length <= 8192:
        found["target, PyTorch strips"] = milliseconds(
            lambda: future_attention_target(query, key, backend="chunked", **arguments), repeat=1
        )
    if tune:
        scale = DIM**-0.5
        for tile in TILES:
            name = f"tile {tile.rows}x{tile.stream}, {tile.warps} warps, {tile.stages} stages" + (
                ", bulk copies" if tile.bulk else ""
            )
            for log in (False, True):
                found[f"target{' (log)' if log else ''}, {name}"] = milliseconds(
                    lambda tile=tile, log=log: target.future_attention_target_triton(
                        query,
                        key,
                        None,
                        normalizer,
                        scale=scale,
                        eps=1e-9,
                        logarithmic=log,
                        tile=tile,
                        **arguments,
                    ),
                    repeat=40,
                )
            found[f"normaliser, {name}"] = milliseconds(
                lambda tile=tile: target.dense_log_normalizer_triton(
                    query, key, None, scale=scale, tile=tile
                ),
                repeat=40,
            )
    return found


def compile_tile(tile: Tile) -> None:
    """Compile what `--tune` times of one tile, into Triton's cache: many processes do this at once."""
    query = torch.randn(1, HEADS, 1024, DIM, device="cuda", dtype=torch.bfloat16)
    key = query[:, :KV_HEADS].contiguous()
    normalizer = target.dense_log_normalizer_triton(query, key, None, scale=1.0, tile=tile)
    for log in (False, True):
        target.future_attention_target_triton(
            query, key, None, normalizer, window=256, aggregation="max", eps=1e-9, scale=1.0,
            logarithmic=log, tile=tile,
        )  # fmt: skip


def time_scorer(length: int) -> dict[str, float]:
    """The mLSTM scorer of one layer over a row: forward, and forward with backward."""
    scorer = MLSTMScorer(KV_HEADS, DIM, 2560, delay=BUDGET.window).cuda()
    key = torch.randn(1, KV_HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)
    value = torch.randn_like(key)
    position = torch.arange(length, device="cuda").unsqueeze(0)
    ids = position // 8192

    def forward(document_ids: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            return scorer(key, value, None, position=position, document_ids=document_ids)

    def both(document_ids: Tensor | None = None) -> None:
        scorer.zero_grad(set_to_none=True)
        scorer(key, value, None, position=position, document_ids=document_ids).sum().backward()

    return {
        "mlstm forward": milliseconds(forward),
        "mlstm forward, documents": milliseconds(lambda: forward(ids)),
        "mlstm forward+backward": milliseconds(both),
        "mlstm forward+backward, documents": milliseconds(lambda: both(ids)),
        "mlstm forward+backward, MiB": peak_mib(both),
    }


def scorer_accuracy(length: int) -> dict[str, float]:
    """The chunkwise form in float32 against the quadratic definition in float64, values and gradients."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float64)

    inputs = [normal(1, 2, length, 16), normal(1, 2, length, 16), normal(1, 2, length, 32)]
    inputs += [normal(1, 2, length), 5 + normal(1, 2, length)]
    weight = normal(1, 2, length, 32)
    ids = (torch.arange(length, device="cuda") // (length // 2 + 7)).unsqueeze(0)
    found = {}
    for name, document_ids in (("one document", None), ("documents", ids)):
        exact_in = [x.clone().requires_grad_() for x in inputs]
        exact = mlstm_quadratic(*exact_in, document_ids=document_ids)
        (exact * weight).sum().backward()
        fast_in = [x.float().requires_grad_() for x in inputs]
        fast, _ = mlstm_chunkwise(*fast_in, document_ids=document_ids, chunk=64)
        (fast * weight.float()).sum().backward()
        found[f"mlstm error, {name}"] = float(((fast - exact).abs().max() / exact.abs().max()).detach())
        found[f"mlstm gradient error, {name}"] = max(
            float((a.grad - b.grad).abs().max() / b.grad.abs().max())
            for a, b in zip(fast_in, exact_in, strict=True)
        )
        del exact, exact_in
        torch.cuda.empty_cache()
    quadratic = [x.float() for x in inputs]
    with torch.no_grad():
        found["mlstm quadratic form, 2 heads, forward"] = milliseconds(lambda: mlstm_quadratic(*quadratic))
        found["mlstm chunkwise form, 2 heads, forward"] = milliseconds(
            lambda: mlstm_chunkwise(*quadratic, chunk=64)
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 65536])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--compile", type=int, help="only compile this one of the tiles of --tune")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.compile is not None:
        compile_tile(TILES[arguments.compile])
        return
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shapes": {"query_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": "bfloat16"},
        "budget": BUDGET.total,
        "unit": "ms",
        "lengths": {},
    }
    for length in arguments.lengths:
        tune = arguments.tune and length == 32768
        found = time_targets(length, tune) | time_orders(length, tune) | time_scorer(length)
        result["lengths"][length] = found
        print(f"T {length}", flush=True)
        for name, value in found.items():
            ratio = "" if "MiB" in name else f"  {value / found['dense attention forward']:7.3f} of dense"
            print(f"  {name:62s} {value:10.3f}{ratio}", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    result["accuracy"] = scorer_accuracy(8192)
    for name, value in result["accuracy"].items():
        print(f"  {name:62s} {value:.3g}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
