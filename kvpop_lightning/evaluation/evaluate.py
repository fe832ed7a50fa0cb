"""`evaluate(config)`: each policy and budget on held-out rows against the dense model at equal bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError
from kvpop_lightning.evaluation.contestants import Contestant, budget_of, build_contestants, measured_bytes
from kvpop_lightning.evaluation.pictures import draw_figures
from kvpop_lightning.evaluation.ragged import ragged_facts
from kvpop_lightning.evaluation.rows import Record, RowSettings, dense_record, dense_row, policy_record
from kvpop_lightning.evaluation.store import EvaluationStore
from kvpop_lightning.evaluation.table import Entry, add_intervals, entry, refusal, write_table
from kvpop_lightning.models import is_retrofitted, load_model, retrofit, unretrofit
from kvpop_lightning.models.fingerprint import base_fingerprint
from kvpop_lightning.training.forward import collate, to_device
from kvpop_lightning.training.progress import ProgressLine


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation leaves behind."""

    table: list[Entry]
    """As in `table.json`."""
    table_path: Path
    markdown_path: Path
    figures: list[Path] = field(default_factory=list)
    computed: int = 0
    """Row records computed now."""
    reused: int = 0
    """Row records taken from `run_dir/eval_cache`."""
    seconds: float = 0.0

    @property
    def artifacts(self) -> list[Path]:
        """Every file a tracking run should keep."""
        return [self.table_path, self.markdown_path, *self.figures]


def first_position(config: Config) -> int:
    """First row position that counts, in tokens: that share of `eval.reference_length`."""
    return int(config.eval.first_position * min(config.eval.reference_length, config.data.row_length))


def row_settings(config: Config) -> RowSettings:
    return RowSettings(
        first_position=first_position(config),
        position_stride=config.eval.position_stride,
        window=config.policy.budget.window,
        aggregation=config.distill.target.aggregation,
        boundary=config.distill.boundary,
    )


class Evaluation:
    """One evaluation: rows outside, policies inside, finished records kept on disk.

    Args:
        config: the whole configuration; `run_dir` holds cache, table and figures.
        model: retrofitted model in evaluation mode on its device.
        rows: held-out rows (`__len__`, `__getitem__` -> dict without batch dimension).
        fingerprint: of the data.
        contestants: the (policy, budget) pairs, those that cannot run included.
        progress: show a line with an estimate of what is left.
    """

    def __init__(
        self,
        config: Config,
        model: Any,
        rows: Any,
        fingerprint: str,
        contestants: Sequence[Contestant],
        *,
        progress: bool = True,
    ) -> None:
        self.config, self.model, self.rows = config, model, rows
        self.contestants = [c for c in contestants if c.reason is None]
        self.refused = [c for c in contestants if c.reason is not None]
        self.order, self.progress = [c.pair for c in contestants], progress
        self.settings = row_settings(config)
        self.count = min(config.eval.rows, len(rows))
        if self.count < 1:
            raise UserError("there is no held-out row to evaluate: raise data.eval_rows or eval.rows")
        self.store = EvaluationStore(
            Path(config.run_dir) / "eval_cache",
            {
                "model": base_fingerprint(model),
                "dtype": str(next(model.parameters()).dtype),
                "data": fingerprint,
                "settings": vars(self.settings),
            },
        )

    def batch(self, row: int) -> dict[str, Tensor]:
        return to_device(collate([self.rows[row]]), next(self.model.parameters()).device)

    def records(self) -> dict[tuple[str, int], list[Record]]:
        """Records of every contestant, one per row, read back or computed."""
        known: dict[tuple[str, int], dict[int, Record]] = {c.pair: {} for c in self.contestants}
        for contestant in self.contestants:
            for row in range(self.count):
                record = self._stored(contestant, row)
                if record is not None:
                    known[contestant.pair][row] = record
        waiting = {
            row: [c for c in self.contestants if row not in known[c.pair]] for row in range(self.count)
        }
        total, done = sum(len(w) for w in waiting.values()), 0
        line = ProgressLine("evaluate", total, unit="forward", enabled=self.progress and total > 0)
        for row, contestants in waiting.items():
            for contestant, record in self._compute(row, contestants):
                known[contestant.pair][row] = record
                done += 1
                line.update(done, contestant.describe)
        line.close()
        return {pair: [rows[row] for row in range(self.count)] for pair, rows in known.items()}

    def _stored(self, contestant: Contestant, row: int) -> Record | None:
        if row == 0 and contestant.policy is not None and not self._pattern_file(contestant).exists():
            return None
        return self.store.get(contestant.label, row, contestant.key)

    @torch.inference_mode()
    def _compute(self, row: int, waiting: Sequence[Contestant]) -> Iterator[tuple[Contestant, Record]]:
        """Records of one row: the dense forward once, then every policy that waits for it."""
        if not waiting:
            return
        chunk = self.config.eval.kl_chunk
        longest = max((c.policy.budget.total for c in waiting if c.policy is not None), default=0)
        dense = dense_row(self.model, self.batch(row), self.settings, chunk=chunk, prefix_tokens=longest)
        for contestant in waiting:
            if contestant.policy is None:
                record = dense_record(dense)
            else:
                keep = self._keep_pattern(contestant) if row == 0 else None
                with contestant.active(self.model, dense.layer_targets(), dense.document_ids) as model:
                    record = policy_record(
                        model,
                        dense,
                        self.settings,
                        chunk=chunk,
                        on_eviction=keep,
                        reuse_prefix=contestant.model is None,
                    )
            yield contestant, self.store.put(contestant.label, row, contestant.key, record)

    def _pattern_file(self, contestant: Contestant) -> Path:
        return self.store.path(contestant.label, 0, contestant.key).with_suffix(".npz")

    def _keep_pattern(self, contestant: Contestant) -> Callable[[Tensor], None]:
        """Row 0's eviction times go to disk beside its record, for the eviction-pattern figure."""

        def keep(eviction: Tensor) -> None:
            path = self._pattern_file(contestant)
            path.parent.mkdir(parents=True, exist_ok=True)
            short = eviction.clamp(max=torch.iinfo(torch.int32).max).to("cpu", torch.int32).numpy()
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            with partial.open("wb") as file:
                np.savez_compressed(file, eviction=short)
            partial.replace(path)

        return keep

    def eviction_times(self, contestant: Contestant) -> np.ndarray:
        """int32 [L, Hkv, T] of row 0 (int32's maximum = never)."""
        with np.load(self._pattern_file(contestant)) as file:
            return file["eviction"]

    def bytes_facts(self, contestant: Contestant) -> Record:
        """Bytes one sequence really holds, measured on an allocated cache, and at 2 bytes per element."""
        label = f"{contestant.label}-bytes"
        known = self.store.get(label, 0, contestant.key)
        if known is None:
            known = self.store.put(
                label,
                0,
                contestant.key,
                measured_bytes(self.model, contestant, self.config.eval.reference_length),
            )
        return known

    def table(self) -> list[Entry]:
        """`table.json`'s objects, intervals included."""
        records = self.records()
        reference = self.config.eval.reference_length
        entries = [
            entry(
                c.name,
                c.total,
                reference,
                records[c.pair],
                **c.facts(),
                **(facts := self.bytes_facts(c))
                | ragged_facts(c.policy, records[c.pair], reference, facts["element_bytes"]),
            )
            for c in self.contestants
        ]
        add_intervals(entries)
        entries += [
            refusal(c.name, c.total, reference, str(c.reason)) | {"bounded": c.facts()["bounded"]}
            for c in self.refused
        ]
        return sorted(entries, key=lambda e: self.order.index((e["policy"], e["budget"])))


def evaluate(
    config: Config,
    policies: Sequence[str] | None = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    progress: bool | None = None,
    refused: Mapping[str, str] | None = None,
) -> EvaluationResult:
    """Compare policies with the dense model on held-out rows; writes `table.json`, `table.md` and figures.

    Everything goes to `run_dir`. Finished rows are kept in its `eval_cache`: a second call reuses them, an
    interrupted one resumes.

    Args:
        config: `eval.policies`, `eval.budgets` (total keys per KV head) and `eval.rows` say what is compared;
            trained policies are read from `run_dir/policy/<name>`.
        policies: instead of `eval.policies`.
        model, tokenizer: as `load_model` gives them; None = loaded from `config.model`.
        data: a prepared DataModule; None = made from `config.data`.
        progress: None = `trainer.progress`.
        refused: policies that cannot run, by name with the reason; their cells say it.

    Raises:
        UserError: an unknown policy, one that is not trained yet, a budget that cannot hold sinks and window,
            or no held-out row.
    """
    started = time.monotonic()
    if model is None or tokenizer is None:
        model, tokenizer = load_model(config.model)
    if data is None:
        from kvpop_lightning.data import PackedMathDataModule  # costs seconds: Lightning

        data = PackedMathDataModule(config.data, tokenizer, seed=config.seed)
        data.prepare_data()
        data.setup("validate")
    was_training, was_retrofitted = model.training, is_retrofitted(model)
    model.eval()
    if not was_retrofitted:  # any policy will do: each contestant sets its own
        retrofit(model, budget_of(config, max(config.eval.budgets)), policy="streaming_llm")
    before = model.kvpop
    try:
        contestants = build_contestants(model, config, policies or config.eval.policies, refused)
        run = Evaluation(
            config,
            model,
            data.eval_rows,
            str(data.fingerprint),
            contestants,
            progress=config.trainer.progress if progress is None else progress,
        )
        table = run.table()
        table_path, markdown_path = write_table(table, config.run_dir)
        figures = []
        if config.eval.figures:
            with Console(stderr=True).status("drawing the figures"):  # some seconds; shown on a terminal only
                figures = draw_figures(run, table, tokenizer)
    finally:
        model.kvpop = before
        if not was_retrofitted:
            unretrofit(model)
        model.train(was_training)
    return EvaluationResult(
        table=table,
        table_path=table_path,
        markdown_path=markdown_path,
        figures=figures,
        computed=run.store.computed,
        reused=run.store.reused,
        seconds=time.monotonic() - started,
    )
