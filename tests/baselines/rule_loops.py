"""Every rule as a plain loop over one text, float64, Python lists; written from docs/baselines.md and
METHOD.md, sharing no code with the package.

`attended(name, ...)` gives, per KV head and query, the set of attended positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

STATIC = ("streaming_llm", "random", "key_norm", "oracle", "random+decay", "key_norm+decay")
STEPWISE = (
    "tova",
    "tova_head",
    "h2o",
    "h2o_mean",
    "attention_ema",
    "keydiff",
    "expected_attention",
    "snapkv",
)


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    total = sum(weights)
    return [w / total for w in weights]


def dot(a: Tensor, b: Tensor) -> float:
    return float(a @ b)


def static(scores: list[list[float]], budget, gamma: float, step: int) -> list[list[set[int]]]:
    """METHOD.md sections 1 and 2: sinks, window and the k best of all that left it, found anew each time."""
    result = []
    for head in scores:
        sees = []
        for i in range(len(head)):
            eligible = list(range(budget.sink, i - budget.window + 1))

            def effective(j: int, head=head, i=i) -> float:
                return head[j] - (j // step) * math.log(gamma)

            best = sorted(eligible, key=lambda j: (effective(j), j), reverse=True)[: budget.topk]
            window = list(range(max(0, i - budget.window + 1), i + 1))
            sinks = list(range(min(budget.sink, i + 1)))
            sees.append(set(best) | set(window) | set(sinks))
        result.append(sees)
    return result


class Loop:
    """One text under a stepwise rule: query [Hq, N, D], key and value [H, N, D]."""

    def __init__(self, name: str, query: Tensor, key: Tensor, value: Tensor, budget, **options) -> None:
        self.name, self.query, self.key, self.value, self.budget = name, query, key, value, budget
        self.options = options
        self.heads, self.length, self.dim = key.shape
        self.group = query.shape[0] // self.heads
        self.plain: list[list[Tensor]] = [[] for _ in query]  # queries before RoPE, where a rule asks
        self.attended: list[tuple[int, int, list[dict[int, float]]]] = []

    def run(self) -> list[list[set[int]]]:
        held: list[list[int]] = [[] for _ in range(self.heads)]
        memory: list[dict[int, float]] = [{} for _ in range(self.heads)]
        sees: list[list[set[int]]] = [[] for _ in range(self.heads)]
        for i in range(self.length):
            attention = []  # [Hq]: {position: probability}
            for h in range(self.heads):
                held[h].append(i)
                memory[h][i] = 0.0
                sees[h].append(set(held[h]))
                for g in range(h * self.group, (h + 1) * self.group):
                    logits = [dot(self.query[g, i], self.key[h, j]) * self.dim**-0.5 for j in held[h]]
                    attention.append(dict(zip(held[h], softmax(logits), strict=True)))
            for h in range(self.heads):
                for j in held[h]:
                    shared = [attention[g][j] for g in range(h * self.group, (h + 1) * self.group)]
                    mean = sum(shared) / len(shared)
                    if self.name == "tova":
                        memory[h][j] = sum(a[j] for a in attention) / len(attention)
                    elif self.name in ("tova_head", "snapkv"):
                        memory[h][j] = mean
                    elif self.name in ("h2o", "h2o_mean"):
                        memory[h][j] += mean
                    elif self.name == "attention_ema":
                        memory[h][j] = self.options["averaging"] * memory[h][j] + mean
            for h in range(self.heads):
                if self.name == "snapkv" and i < self.options["prompt_length"] - 1:
                    self.attended.append((h, i, [attention[g] for g in self.group_of(h)]))
                    continue
                if self.name == "snapkv" and i == self.options["prompt_length"] - 1:
                    self.attended.append((h, i, [attention[g] for g in self.group_of(h)]))
                    if len(held[h]) >= self.budget.total:
                        held[h] = self.snap(h, i + 1)
                        continue
                if len(held[h]) == self.budget.total:
                    held[h].remove(self.victim(h, i, held[h], memory[h]))
        return sees

    def group_of(self, h: int) -> range:
        return range(h * self.group, (h + 1) * self.group)

    def snap(self, h: int, length: int) -> list[int]:
        """SnapKV's choice at the end of a prompt: `total - 1` keys, its newest ones among them."""
        observed, pool = self.options["observed"], self.options["pool"]
        recent = min(observed, self.budget.total // 2)
        mean = [0.0] * (length - recent)
        for head, i, groups in self.attended:
            if head == h and i >= length - observed:
                for j in range(min(len(mean), i + 1)):
                    mean[j] += sum(a[j] for a in groups) / len(groups) / observed
        half = pool // 2
        pooled = [sum(mean[max(0, j - half) : j + half + 1]) / pool for j in range(len(mean))]
        best = sorted(range(len(mean)), key=lambda j: (pooled[j], j), reverse=True)
        return sorted(best[: self.budget.total - 1 - recent]) + list(range(length - recent, length))

    def victim(self, h: int, i: int, held: list[int], memory: dict[int, float]) -> int:
        """Lowest value among those not protected; the oldest among equals."""
        total = self.budget.total
        if self.name in ("tova", "tova_head", "snapkv"):
            free = [j for j in held if j != i]
        elif self.name in ("h2o", "h2o_mean"):
            free = sorted(held)[: len(held) - total // 2]
        else:  # KVpop's sinks and window: query i + 1 will see its own key and the w - 1 newest
            free = [j for j in held if j >= self.budget.sink and i + 1 - j >= self.budget.window]
        value: Callable[[int], float] = memory.__getitem__
        if self.name == "h2o_mean":
            value = lambda j: memory[j] / (i - j + 1)  # noqa: E731
        elif self.name == "keydiff":
            unit = {j: self.key[h, j] / self.key[h, j].norm() for j in held}
            mean = sum(unit.values()) / len(unit)
            value = lambda j: -dot(unit[j], mean) / float(mean.norm())  # noqa: E731
        elif self.name == "expected_attention":
            value = self.expected(h, i, held).__getitem__
        return min(free, key=lambda j: (value(j), j))

    def rotation(self, position: float) -> Tensor:
        """RoPE as a matrix [D, D] that turns channel n with channel n + D / 2."""
        half, matrix = self.dim // 2, torch.zeros(self.dim, self.dim, dtype=torch.float64)
        for n in range(half):
            angle = position * self.options["inv_freq"][n]
            matrix[n, n] = matrix[n + half, n + half] = math.cos(angle)
            matrix[n, n + half], matrix[n + half, n] = -math.sin(angle), math.sin(angle)
        return matrix

    def expected(self, h: int, i: int, held: list[int]) -> dict[int, float]:
        future, skip = self.options["future"], self.options["skip"]
        ahead = sum(self.rotation(i + n) for n in range(1, future + 1)) / future
        scores = dict.fromkeys(held, 0.0)
        for g in range(h * self.group, (h + 1) * self.group):
            while len(self.plain[g]) <= i:
                t = len(self.plain[g])
                self.plain[g].append(self.rotation(-t) @ self.query[g, t])
            plain = torch.stack(self.plain[g][skip : i + 1])
            mean = plain.mean(0)
            sigma = (plain - mean).T @ (plain - mean) / len(plain)
            mean, sigma = ahead @ mean, ahead @ sigma @ ahead.T
            logits = [
                dot(self.key[h, j], mean) / math.sqrt(self.dim)
                + dot(self.key[h, j] @ sigma, self.key[h, j]) / (2 * self.dim)
                for j in held
            ]
            for j, weight in zip(held, softmax(logits), strict=True):
                scores[j] += weight / self.group
        return {j: s * float(self.value[h, j].norm()) for j, s in scores.items()}


def texts_of(document_ids: Tensor | None, batch: int, length: int) -> list[tuple[int, list[int]]]:
    """(row, columns) of every document."""
    if document_ids is None:
        return [(b, list(range(length))) for b in range(batch)]
    found = []
    for b in range(batch):
        ids = document_ids[b].tolist()
        found += [(b, [t for t in range(length) if ids[t] == d]) for d in sorted(set(ids) - {-1})]
    return found


def plain_map(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    budget,
    document_ids: Tensor | None,
    *,
    scores: Tensor | None = None,
    gamma: float = 1.0,
    step: int = 1,
    **options,
) -> Tensor:
    """bool [B, H, T, T] of the plain loops; `scores` [B, H, T] for the static rules, by row."""
    batch, heads, length, _ = key.shape
    sees = torch.zeros(batch, heads, length, length, dtype=torch.bool)
    for row, columns in texts_of(document_ids, batch, length):
        if name in STEPWISE:
            found = Loop(
                name, query[row][:, columns], key[row][:, columns], value[row][:, columns], budget, **options
            ).run()
        else:
            assert scores is not None
            found = static(scores[row][:, columns].double().tolist(), budget, gamma, step)
        for h in range(heads):
            for i, attended in enumerate(found[h]):
                for j in attended:
                    sees[row, h, columns[i], columns[j]] = True
    return sees
