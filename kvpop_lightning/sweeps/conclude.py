"""The end of a sweep: the best trials measured again, the winner trained with further seeds."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpop_lightning.sweeps import best as best_trials
from kvpop_lightning.sweeps import confirm
from kvpop_lightning.sweeps import trial as trials
from kvpop_lightning.sweeps.objective import Objective
from kvpop_lightning.sweeps.trial import TrialResult, run_trial
from kvpop_lightning.sweeps.worker import WorkPlan

LOOK_S = 0.2
CONFIRMED = "confirmed"


class Conclusion:
    """What is measured when all trials are done, `workers` processes at a time.

    Everything is kept in the study: a conclusion that was interrupted goes on.

    Args:
        plan: what the trials ran with.
        gpus: one device per worker, or nothing.
        seed: of the trials.
    """

    def __init__(
        self, plan: WorkPlan, study: Any, *, gpus: Sequence[str | None], workers: int, seed: int
    ) -> None:
        self.plan, self.study, self.seed = plan, study, seed
        self.gpus, self.workers = list(gpus), max(1, workers)
        self.stop = threading.Event()

    def rescored(self) -> list[dict[str, Any]]:
        """`best.json`: the best trials and the baseline on `rescore.rows` rows, best first."""
        return best_trials.rescore(self.study, self.plan.sweep, self._measure_again)

    def confirmed(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """`confirmed.json`, None when the sweep asks for no further seeds or has nothing to compare."""
        sweep = self.plan.sweep
        arms = confirm.arms_of(entries, sweep.without) if sweep.confirm_seeds > 1 else {}
        if not arms:
            return None
        metric, seeds = sweep.objective.metrics[0], range(self.seed, self.seed + sweep.confirm_seeds)
        known: dict[str, Any] = dict(self.study.user_attrs.get(CONFIRMED, {}))
        rows = f"-rows{sweep.rescore_rows}"
        planned = confirm.trainings(arms, seeds)
        for training in planned:  # the trials themselves were the first seed
            for entry in entries:
                if training.seed == self.seed and entry["point"] == training.point:
                    known[training.key + rows] = {"values": entry["rescored"], "rows": entry["rows"]}
        missing = [training for training in planned if training.key + rows not in known]
        if missing:
            print(f"{len(missing)} trainings compare the winner over {len(seeds)} seeds", flush=True)
        objective = replace(sweep.objective, rows=sweep.rescore_rows)
        for training, result in self._side_by_side(missing, lambda t, gpu: self._train(t, objective, gpu)):
            self._tell(f"{training.arm}, seed {training.seed}", result, objective)
            if result.state == trials.FINISHED:
                known[training.key + rows] = {"values": result.values, "rows": result.rows}
                self.study.set_user_attr(CONFIRMED, known)
        keys = {(training.arm, training.seed): training.key + rows for training in planned}

        def found(arm: str, seed: int) -> confirm.Measured | None:
            entry = known.get(keys[arm, seed])
            return entry and confirm.Measured(entry["values"][metric], entry["rows"][metric])

        return confirm.conclusion(arms, list(seeds), metric, found)

    def _measure_again(
        self, chosen: Sequence[Any], objective: Objective
    ) -> Iterator[tuple[Any, TrialResult]]:
        if chosen:
            print(f"{len(chosen)} trials are measured again on {objective.rows} rows", flush=True)
        for trial, result in self._side_by_side(chosen, lambda t, gpu: self._evaluate(t, objective, gpu)):
            self._tell(f"trial {trial.number}", result, objective)
            yield trial, result

    def _evaluate(self, trial: Any, objective: Objective, gpu: str | None) -> TrialResult:
        ticket = trial.user_attrs["ticket"]
        return self._run(
            trial.user_attrs.get("point", dict(trial.params)),
            objective,
            gpu,
            folder=self.plan.trial_folder(ticket),
            name=f"trial {ticket}",
            measure={"prefix": "rescored/"},
        )

    def _train(self, training: confirm.Training, objective: Objective, gpu: str | None) -> TrialResult:
        return self._run(
            training.point,
            objective,
            gpu,
            words=[f"seed={training.seed}"],
            folder=self.plan.folder / "confirm" / training.key,
            name=f"{training.arm}, seed {training.seed}",
            tags={"confirm": training.arm, "seed": str(training.seed)},
        )

    def _run(
        self,
        point: Mapping[str, Any],
        objective: Objective,
        gpu: str | None,
        *,
        folder: Path,
        name: str,
        words: Sequence[str] = (),
        measure: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> TrialResult:
        plan = self.plan
        return run_trial(
            [*plan.words, *words],
            point,
            run_dir=folder,
            objective=objective,
            gpu=gpu,
            tags={**plan.tags, **(tags or {})},
            name=name,
            measure=measure,
            stop=self.stop,
            grace_s=plan.grace_s,
            memory_limit_gb=plan.memory_limit_gb,
            threads=plan.threads,
            command=plan.command,
        )

    def _tell(self, label: str, result: TrialResult, objective: Objective) -> None:
        name = objective.metrics[0]
        if result.state == trials.FINISHED:
            print(f"{label}: {name} {result.values[name]:.5g}", flush=True)
        else:
            print(f"{label} could not be measured: {result.message}", flush=True)
        self.plan.runs.ended(result.run_id, result.state, {}, run_dir=result.run_dir, name=result.name)

    def _side_by_side(
        self, items: Iterable[Any], run: Callable[[Any, str | None], TrialResult]
    ) -> Iterator[tuple[Any, TrialResult]]:
        """(item, result) as they end. Ctrl-C stops what runs, in order, and is raised."""
        free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for index in range(self.workers):
            free.put(self.gpus[index % len(self.gpus)] if self.gpus else None)

        def one(item: Any) -> TrialResult:
            gpu = free.get()
            try:
                return run(item, gpu)
            finally:
                free.put(gpu)

        with ThreadPoolExecutor(self.workers) as pool:
            waiting: dict[Future[TrialResult], Any] = {pool.submit(one, item): item for item in items}
            try:
                while waiting:
                    done, _ = wait(waiting, timeout=LOOK_S, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield waiting.pop(future), future.result()
            except BaseException:
                self.stop.set()
                for future in waiting:
                    future.cancel()
                raise
