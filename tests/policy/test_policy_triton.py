"""The policy's Triton kernels against float64 definitions: on a GPU, or on tiny cases in Triton's interpreter
(`TRITON_INTERPRET=1`, where triton is installed)."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpop_lightning.errors import UserError
from kvpop_lightning.policy import (
    Budget,
    dense_log_normalizer,
    eviction_time,
    future_attention_target,
    running_kth_best,
    teacher_decisions,
)
from kvpop_lightning.policy import triton_choice as choice
from kvpop_lightning.policy.documents import DocumentLayout, document_layout

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

on_gpu = pytest.mark.skipif(not (HAS_TRITON and HAS_CUDA), reason="needs triton and a CUDA device")
in_interpreter = pytest.mark.skipif(
    not (HAS_TRITON and INTERPRETED), reason="needs triton and TRITON_INTERPRET=1"
)


class Draw:
    """Random sizes from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def choice(self, *options: Any) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def documents(self, batch: int, length: int) -> Tensor | None:
        """None, few long documents, many short ones, one-token documents; padding nowhere or anywhere."""
        kind = self.choice("none", "few", "many", "ones")
        if kind == "none":
            return None
        count = {"few": 4, "many": 1 + length // 20, "ones": length}[kind]
        starts = torch.rand(batch, length, generator=self.generator) < count / length
        ids = starts.long().cumsum(-1)
        padding = self.choice("none", "holes", "ends")
        if padding == "holes":
            ids[torch.rand(batch, length, generator=self.generator) < 0.05] = -1
        elif padding == "ends":
            ids[:, : self.integer(0, length // 4)] = -1
            ids[:, length - self.integer(0, length // 4) :] = -1
        return ids


def order_case(seed: int, longest: int, device: str) -> None:
    """Times, running k-th best and decisions of one random problem, against the sequential forms."""
    draw = Draw(seed)
    length, batch, heads = draw.integer(1, longest), draw.integer(1, 2), draw.integer(1, 3)
    priority = draw.normal(batch, heads, length)
    kind = draw.choice("distinct", "ties", "constant", "infinite", "newer", "decayed", "older", "close")
    step = torch.arange(length, dtype=torch.float64)
    if kind == "ties":
        priority = priority.mul(2).round()
    elif kind == "constant":
        priority = torch.zeros_like(priority)
    elif kind == "infinite":
        priority = torch.where(priority.abs() > 0.8, priority * math.inf, priority.round())
    elif kind == "newer":
        priority = priority * 0.1 + 0.01 * step
    elif kind == "decayed":
        priority = priority * 3 + 0.36 * (step // 64)
    elif kind == "older":
        priority = priority * 0.1 - 0.01 * step
    elif kind == "close":  # differences that float32 would lose
        priority = 700 + priority * 1e-9
    ids = draw.documents(batch, length)
    largest = draw.choice(3, 70, 130, length)
    budget = Budget(draw.integer(0, 4), draw.choice(1, 2, 16, 65), draw.integer(1, max(1, largest)))
    if ids is not None:
        priority = priority.masked_fill((ids < 0).unsqueeze(1), math.nan)  # nobody may look at it
    there = priority.to(device)
    there_ids = None if ids is None else ids.to(device)
    where = (seed, length, kind, budget)
    got = eviction_time(there, budget, document_ids=there_ids, backend="triton")
    assert torch.equal(got.cpu(), eviction_time(priority, budget, document_ids=ids, backend="reference")), (
        where
    )
    arguments: dict[str, Any] = {"k": budget.topk, "sink": budget.sink}
    best = running_kth_best(there, document_ids=there_ids, backend="triton", **arguments)
    expected = running_kth_best(priority, document_ids=ids, backend="reference", **arguments)
    assert torch.equal(best.cpu(), expected), where
    decided = teacher_decisions(there, budget, document_ids=there_ids, backend="triton")
    for mine, theirs in zip(
        decided, teacher_decisions(priority, budget, document_ids=ids, backend="parallel"), strict=True
    ):
        assert torch.equal(mine.cpu(), theirs), where


def layout_case(seed: int, longest: int, device: str) -> None:
    """Every field of the layout of one random batch, ids that fall included, against the plain form."""
    from kvpop_lightning.policy.triton_documents import layout_triton

    draw = Draw(seed)
    length, batch = draw.integer(1, longest), draw.integer(1, 3)
    ids = draw.documents(batch, length)
    if ids is None:
        ids = torch.full((batch, length), draw.choice(-1, 0, 7))
    if draw.integer(0, 4) == 0:
        ids = ids.flip(-1)
    ids = ids * draw.choice(1, 2**40)  # ids need not fit 32 bits
    ids = torch.where(ids < 0, -1, ids)
    expected = document_layout(ids, batch=batch, length=length)
    real, fields, row_at = layout_triton(ids.to(device))
    got = DocumentLayout(real, *fields.unbind(), row_at, packed=True)
    for name, one in vars(expected).items():
        if isinstance(one, Tensor):
            assert torch.equal(getattr(got, name).cpu(), one), (seed, name)


def target_case(seed: int, longest: int, device: str, *, shortest: int = 1) -> tuple[float, float]:
    """Largest errors of normaliser and target of one random problem against float64."""
    draw = Draw(seed)
    length, batch = draw.integer(shortest, longest), draw.integer(1, 2)
    kv_heads, group = draw.integer(1, 2), draw.choice(1, 4, 5)
    # The interpreter multiplies bfloat16 by its bits.
    dtypes = (torch.float32, torch.float16) + ((torch.bfloat16,) if device == "cuda" else ())
    dtype = draw.choice(*dtypes)
    dim = draw.choice(64, 80, 96, 128, 256) if device == "cuda" else draw.choice(16, 24)
    query = (draw.normal(batch, length, kv_heads * group, dim) * 2).to(dtype).transpose(1, 2)
    key = draw.normal(batch, kv_heads, length, dim).to(dtype)
    ids = draw.documents(batch, length)
    if ids is not None:
        hidden = (ids < 0)[:, None, :, None]
        query, key = query.masked_fill(hidden, math.nan), key.masked_fill(hidden, math.nan)
        ids = ids.to(device)
    query, key = query.to(device), key.to(device)
    exact = dense_log_normalizer(query.double(), key.double(), document_ids=ids, backend="chunked")
    dense = dense_log_normalizer(query, key, document_ids=ids, backend="triton").double()
    assert torch.equal(dense == -math.inf, exact == -math.inf), seed
    off = (dense - exact).nan_to_num(0.0).abs().max()  # -inf - -inf
    normalizer = exact
    if draw.integer(0, 1):
        normalizer = exact + draw.normal(*exact.shape).to(device)
    normalizer = normalizer.clone()
    normalizer[:, :, length // 2] = -math.inf  # a query that saw nothing
    arguments: dict[str, Any] = {
        "window": draw.choice(1, 3, 16, 65),
        "document_ids": ids,
        "normalizer": None if draw.integer(0, 2) == 0 else normalizer,
        "aggregation": draw.choice("max", "mean", "logmeanexp"),
        "eps": draw.choice(1e-9, 1e-2, 0.0),
        "scale": draw.choice(None, 0.1),
    }
    if arguments["scale"] is not None:
        arguments["normalizer"] = None  # it was made for another scale
    got, valid = future_attention_target(query, key, backend="triton", **arguments)
    expected, expected_valid = future_attention_target(
        query.double(), key.double(), backend="chunked", **arguments
    )
    assert torch.equal(valid, expected_valid), seed
    assert (got[~valid] == 0).all(), seed
    assert torch.equal(got.isfinite(), expected.isfinite()), (seed, arguments)
    error = (got.double() - expected).nan_to_num(0.0, posinf=0.0, neginf=0.0).abs()
    error = error / expected.abs().nan_to_num(1.0, posinf=1.0, neginf=1.0).clamp(min=1.0)
    return float(off), float(error.max()) if error.numel() else 0.0


@in_interpreter
@pytest.mark.parametrize("seed", range(6))
def test_orders_in_the_interpreter(seed: int) -> None:
    order_case(seed, 150, "cpu")


@in_interpreter
@pytest.mark.parametrize("seed", range(8))
def test_layouts_in_the_interpreter(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpop_lightning.policy import triton_documents

    monkeypatch.setattr(triton_documents, "_BLOCK", 32)  # several blocks
    layout_case(seed, 100, "cpu")


@in_interpreter
@pytest.mark.parametrize("seed", range(6))
def test_targets_in_the_interpreter(seed: int) -> None:
    assert max(target_case(seed, 150, "cpu")) < 2e-5


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize("part", range(20))
def test_two_hundred_random_orders(part: int) -> None:
    for seed in range(part * 10, part * 10 + 10):
        order_case(seed, 600, "cuda")


@pytest.mark.cuda
@on_gpu
def test_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(200):
        layout_case(seed, 700 if seed % 4 else 20000, "cuda")
    ids = torch.arange(40, device="cuda").div(15, rounding_mode="floor")[None]
    with_kernel = document_layout(ids, batch=1, length=40)
    monkeypatch.setattr(choice, "_importable", lambda: False)
    for one, other in zip(
        vars(with_kernel).values(), vars(document_layout(ids, batch=1, length=40)).values(), strict=True
    ):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize("part", range(5))
def test_long_orders(part: int) -> None:
    for seed in range(1000 + part * 4, 1004 + part * 4):
        draw = Draw(seed)
        length = draw.integer(8192, 33000)
        score = draw.normal(1, 2, length).mul(3)
        priority = score + draw.choice(0.0, 0.36, -0.1) * (torch.arange(length) // 64)
        ids = None
        if seed % 2:
            starts = torch.rand(1, length, generator=draw.generator) < draw.choice(2, 70) / length
            ids = starts.long().cumsum(-1)
            ids[:, 100:120] = -1
        budget = Budget(4, draw.choice(1, 256), draw.choice(63, 64, 65, 128, 1000, 3836))
        there_ids = None if ids is None else ids.cuda()
        got = eviction_time(priority.cuda(), budget, document_ids=there_ids, backend="triton")
        expected = eviction_time(priority, budget, document_ids=ids, backend="reference")
        assert torch.equal(got.cpu(), expected), (seed, length, budget)
        best = running_kth_best(priority.cuda(), budget.topk, document_ids=there_ids, backend="triton")
        same = running_kth_best(priority.cuda(), budget.topk, document_ids=there_ids, backend="parallel")
        assert torch.equal(best, same), (seed, length, budget)


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize("part", range(20))
def test_two_hundred_random_targets(part: int) -> None:
    for seed in range(part * 10, part * 10 + 10):
        errors = target_case(seed, 700, "cuda")
        assert max(errors) < 5e-5, (seed, errors)


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize("part", range(5))
def test_long_targets(part: int) -> None:
    for seed in range(2000 + part * 4, 2004 + part * 4):
        errors = target_case(seed, 9500, "cuda", shortest=8192)
        assert max(errors) < 5e-5, (seed, errors)


@pytest.mark.cuda
@on_gpu
def test_auto_takes_the_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(1, 4, 300, 64, device="cuda", dtype=torch.bfloat16)
    priority = torch.randn(1, 2, 300, device="cuda")
    assert choice.choose_backend("auto", priority, work="x", otherwise="parallel") == "triton"
    auto = future_attention_target(query, query[:, :2], window=8)[0]
    assert torch.equal(auto, future_attention_target(query, query[:, :2], window=8, backend="triton")[0])
    doubled = query.double()  # the kernels do not take it, auto does
    assert future_attention_target(doubled, doubled[:, :2], window=8)[0].dtype == torch.float64


def test_auto_says_once_why(caplog: pytest.LogCaptureFixture) -> None:
    choice.say.cache_clear()
    priority = torch.randn(1, 2, 40)
    with caplog.at_level(logging.INFO, logger=choice.__name__):
        for _ in range(3):
            eviction_time(priority, Budget(1, 2, 3))
    assert len(caplog.records) == 1
    assert "eviction_time: backend parallel (" in caplog.records[0].getMessage()


def test_triton_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    query, priority = torch.randn(1, 2, 9, 64), torch.randn(1, 2, 9)
    for found, reason in ((False, "triton is not installed"), (True, "triton needs a CUDA tensor")):
        monkeypatch.setattr(choice, "_importable", lambda found=found: found)
        with pytest.raises(UserError, match=reason):
            eviction_time(priority, Budget(0, 1, 1), backend="triton")
        with pytest.raises(UserError, match=reason):
            running_kth_best(priority, 2, backend="triton")
        with pytest.raises(UserError, match=reason):
            future_attention_target(query, query, window=2, backend="triton")
        with pytest.raises(UserError, match=reason):
            dense_log_normalizer(query, query, backend="triton")


def test_what_the_kernels_do_not_take_is_named() -> None:
    assert "float64" in choice.triton_refusal(torch.zeros(1, 1, 1, 64, dtype=torch.float64))
    assert "head dimensions 16 to 256" in choice.triton_refusal(torch.zeros(1, 1, 1, 8))
    assert choice.triton_refusal(torch.zeros(1, 1, 1, 80, dtype=torch.bfloat16)) == ""
