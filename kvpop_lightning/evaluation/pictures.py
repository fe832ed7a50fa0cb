"""The pictures of an evaluation: KL against budget, retained attention by layer, an eviction pattern."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpop_lightning.evaluation.figures import (
    eviction_pattern,
    kl_against_budget,
    paired_differences,
    retained_mass_by_layer,
)
from kvpop_lightning.evaluation.table import Entry, best_learned, budgets_of

if TYPE_CHECKING:
    from kvpop_lightning.evaluation.contestants import Contestant
    from kvpop_lightning.evaluation.evaluate import Evaluation


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of every token by itself."""
    return [tokenizer.decode([int(i)]) for i in ids]


def share_of_heads(eviction: np.ndarray, query: int) -> np.ndarray:
    """[L, T] share of KV heads holding each token at `query` (0 for later tokens), from [L, Hkv, T] times."""
    held = (eviction > query).mean(1)
    held[:, query + 1 :] = 0.0
    return held


def _shown(contestants: Sequence[Contestant], table: Sequence[Entry], budget: int) -> list[Contestant]:
    """A sliding window, the future, and the best learned policy: what there is of them at `budget`."""
    best = best_learned(table, budget)
    wanted = ["streaming_llm", "oracle", best["policy"] if best else None]
    by_name = {c.name: c for c in contestants if c.policy is not None and c.total == budget}
    shown = [by_name[name] for name in wanted if name in by_name]
    return shown or list(by_name.values())[:1]


def draw_figures(run: Evaluation, table: Sequence[Entry], tokenizer: Any) -> list[Path]:
    """Draw and save all figures into `run_dir/figures`; returns their paths."""
    folder = Path(run.config.run_dir) / "figures"
    budgets = budgets_of(table)
    if not budgets:  # only the dense model was evaluated
        return []
    paths = [
        kl_against_budget(table, folder / "kl_vs_budget.png"),
        retained_mass_by_layer(table, folder / "retained_mass.png"),
    ]
    intervals = paired_differences(table, folder / "paired_differences.png")
    paths += [intervals] if intervals is not None else []
    budget = budgets[len(budgets) // 2]
    shown = _shown(run.contestants, table, budget)
    if not shown:
        return paths
    ids = run.batch(0)["input_ids"][0].tolist()
    query = len(ids) - 1
    times = {c.name: run.eviction_times(c) for c in shown}
    paths.append(
        eviction_pattern(
            {name: share_of_heads(eviction, query) for name, eviction in times.items()},
            token_texts(tokenizer, ids),
            folder / "eviction_pattern.png",
            heads=next(iter(times.values())).shape[1],
            query=query,
            sink=run.config.policy.budget.sink,
            window=run.config.policy.budget.window,
            title=f"{budget} keys per KV head",
        )
    )
    return paths
