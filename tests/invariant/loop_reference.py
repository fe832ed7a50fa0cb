"""The bounded cache written as plainly as possible: one row, token by token, Python lists, float64.

It follows the order of a step (METHOD.md section 6): take t = i - w out of the window, write i, absorb i into
the scorer's memory, score t, place or drop t, attend. It shares no code with the package: priorities, the
mLSTM recurrence, the slots and the attention are all written out here. Only trained numbers are read from a
scorer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import silu

NEVER = torch.iinfo(torch.int64).max


class PlainMemory:
    """One mLSTM memory, by the formulas of METHOD.md section 5, in float64."""

    def __init__(self, key_dim: int, value_dim: int) -> None:
        self.C = torch.zeros(key_dim, value_dim, dtype=torch.float64)
        self.n = torch.zeros(key_dim, dtype=torch.float64)
        self.m = -math.inf

    def absorb(self, key: Tensor, value: Tensor, input_gate: float, forget_gate: float) -> None:
        log_f = -math.log1p(math.exp(-forget_gate))
        m = max(log_f + self.m, input_gate)
        keep, take = math.exp(log_f + self.m - m), math.exp(input_gate - m)
        key = key * len(key) ** -0.5
        self.C = keep * self.C + take * torch.outer(key, value)
        self.n = keep * self.n + take * key
        self.m = m

    def read(self, query: Tensor) -> Tensor:
        floor = math.exp(min(-self.m, 80.0))
        return (self.C.T @ query) / max(abs(float(self.n @ query)), floor)


def affine(scorer, head: int, key: Tensor, value: Tensor, hidden: Tensor | None) -> Tensor:
    """The scorer's standardised affine map of one token of one head: key, value [D], hidden [Hid]."""
    projection = scorer.projection
    y = projection.bias[head].double()
    for name, x in (("key", key), ("value", value), ("hidden", hidden)):
        if not hasattr(projection, f"{name}_weight"):
            continue
        row = 0 if name == "hidden" else head
        mean, std = getattr(projection, f"{name}_mean")[row], getattr(projection, f"{name}_std")[row]
        standard = (x.double() - mean.double()) / std.double()
        y = y + standard @ getattr(projection, f"{name}_weight")[head].double()
    return y


@torch.no_grad()
def plain_scores(scorer, key: Tensor, value: Tensor, hidden: Tensor | None) -> list[list[float]]:
    """Scores by [head][token] of one row: key, value [H, T, D], hidden [T, Hid]; 0 without a read."""
    heads, length = key.shape[:2]
    if scorer.kind == "streaming_llm":
        return [[0.0] * length for _ in range(heads)]
    if scorer.kind == "key_norm":
        return [[-float(key[h, t].double().norm()) for t in range(length)] for h in range(heads)]
    if scorer.kind == "random":  # a hash of seed, layer, head and position: nothing to recompute
        return scorer(key[None], value[None], None)[0].double().tolist()
    result = []
    for h in range(heads):
        y = [
            affine(scorer, h, key[h, t], value[h, t], None if hidden is None else hidden[t])
            for t in range(length)
        ]
        if scorer.kind == "linear":
            result.append([float(v[0]) for v in y])
            continue
        out_w, out_b = scorer.output_weight[h].double(), float(scorer.output_bias[h])
        if scorer.kind == "mlp":
            result.append([float(silu(v) @ out_w) + out_b for v in y])
            continue
        d_m, d_v, width = scorer.memory_dim, scorer.value_dim, scorer.width
        memory = PlainMemory(d_m, d_v)
        scores = [0.0] * length
        for i in range(length):
            part = y[i][d_m + width :]
            memory.absorb(part[:d_m], part[d_m : d_m + d_v], float(part[-2]), float(part[-1]))
            t = i - scorer.delay
            if t < 0:
                continue
            read = memory.read(y[t][:d_m])
            normed = read / torch.sqrt((read**2).mean() + 1e-5) * scorer.norm_gain[h].double()
            inner = normed @ scorer.read_weight[h].double() + y[t][d_m : d_m + width]
            scores[t] = float(silu(inner) @ out_w) + out_b
        result.append(scores)
    return result


@dataclass
class PlainHead:
    """The slots of one KV head, and what left them when."""

    sink: int
    window: int
    topk: int
    gamma: float
    decay_step: int
    ring: list[int] = field(default_factory=list)
    sinks: list[int] = field(default_factory=list)
    long_range: list[int] = field(default_factory=list)
    evicted_at: dict[int, int] = field(default_factory=dict)
    most: int = 0

    def priority(self, score: float, t: int) -> float:
        return score - (t // self.decay_step) * math.log(self.gamma)

    def step(self, i: int, score_of: Callable[[int], float]) -> list[int]:
        """Feeds token i; returns the tokens that query i attends."""
        t = None
        if len(self.ring) == self.window:
            t = self.ring.pop(0)
        self.ring.append(i)
        if t is not None:
            if t < self.sink:
                self.sinks.append(t)
            elif len(self.long_range) < self.topk:
                self.long_range.append(t)
            else:
                lowest = min(self.long_range, key=lambda j: (self.priority(score_of(j), j), j))
                if self.priority(score_of(t), t) >= self.priority(score_of(lowest), lowest):
                    self.long_range.remove(lowest)
                    self.long_range.append(t)
                    self.evicted_at[lowest] = i
                else:
                    self.evicted_at[t] = i
        held = self.sinks + self.long_range + self.ring
        assert len(set(held)) == len(held), "a token is stored twice"
        self.most = max(self.most, len(held))
        return held


def decode_layer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: list[list[float]],
    *,
    budget,
    decay: list[float],
    decay_step: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """One layer of one row: query [Hq, T, D], key, value [Hkv, T, D] -> out as query, evictions [Hkv, T]."""
    query, key, value = query.double(), key.double(), value.double()
    heads, length = key.shape[:2]
    group = query.shape[0] // heads
    out = torch.zeros_like(query)
    evictions = torch.full((heads, length), NEVER, dtype=torch.int64)
    for h in range(heads):
        slots = PlainHead(budget.sink, budget.window, budget.topk, decay[h], decay_step)
        for i in range(length):
            held = slots.step(i, lambda j, h=h: scores[h][j])
            for g in range(h * group, (h + 1) * group):
                weights = torch.softmax(key[h, held] @ query[g, i] * scaling, dim=0)
                out[g, i] = weights @ value[h, held]
        for t, i in slots.evicted_at.items():
            evictions[h, t] = i
        assert slots.most <= budget.total
    return out, evictions
