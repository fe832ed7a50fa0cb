"""`kvpop ablate`: run what is missing of a grid, compare its cells."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError
from kvpop_lightning.evaluation.store import write_json
from kvpop_lightning.sweeps.ablation_figure import draw
from kvpop_lightning.sweeps.ablation_points import (
    GridPoint,
    expected_seconds,
    is_finished,
    own_words,
    points_of,
)
from kvpop_lightning.sweeps.ablation_screen import AblationScreen
from kvpop_lightning.sweeps.ablation_table import build_table
from kvpop_lightning.sweeps.ablation_text import markdown
from kvpop_lightning.sweeps.gpus import assign_gpus, thread_share
from kvpop_lightning.sweeps.grid import load_grid
from kvpop_lightning.sweeps.runs import PARENT_TAG, TrialRuns
from kvpop_lightning.sweeps.trial import FINISHED, INTERRUPTED, TrialResult, run_trial
from kvpop_lightning.tracking import TrackedRun
from kvpop_lightning.tracking.environment import write_atomically
from kvpop_lightning.training.progress import clock

log = logging.getLogger(__name__)

LOOK_S = 0.2


@dataclass
class AblationOutcome:
    """What an ablation left behind."""

    folder: Path
    table: dict[str, Any]
    """As in `ablation.json`."""
    ran: int = 0
    """Points that were run now."""
    reused: int = 0
    """Points of this selection that were finished before."""
    failures: list[str] = field(default_factory=list)
    """One line per point that ended without a result."""
    figure: Path | None = None


class Ablation:
    """One call of `kvpop ablate`.

    Args:
        config: its `run_dir` is the ablation's folder.
        overrides: what the user typed; wins over the file.
        command: what runs a point (tests).

    Raises:
        ConfigError, UserError: anything wrong with the file or a cell, before anything starts.
    """

    def __init__(
        self, config: Config, overrides: Sequence[str] = (), *, command: Sequence[str] | None = None
    ) -> None:
        if not config.ablate.name:
            raise UserError("which ablation? kvpop ablate NAME reads sweeps/ablation_NAME.yaml")
        self.config, self.settings, self.command = config, config.ablate, command
        self.grid = load_grid(config.ablate.name)
        self.folder = Path(config.run_dir)
        self.own = own_words(overrides)
        self.points = points_of(self.grid, self.own, self.folder)
        self.records = {p.key: record for p in self.points if (record := p.stored()) is not None}
        chosen = {cell.label for cell in self.grid.select(self.settings.only)}
        self.selected = [point for point in self.points if point.cell.label in chosen]
        self.missing = [p for p in self.selected if not is_finished(self.records.get(p.key))]
        self.gpus = assign_gpus(self.settings.gpus, self.settings.workers)
        self.stop = threading.Event()
        self._errors: list[BaseException] = []

    def overview(self) -> str:
        """The selected cells, what is known of them, and how long the rest should take."""
        lines = []
        for cell in self.grid.cells:
            points = [p for p in self.selected if p.cell is cell]
            states = [f"seed {p.seed} {self.records.get(p.key, {}).get('state', 'to run')}" for p in points]
            note = f"left out: {cell.excluded}" if cell.excluded else ", ".join(states) or "not selected"
            lines.append(f"{cell.label}: {note}")
        return "\n".join([*lines, self.headline()])

    def headline(self) -> str:
        text = f"{len(self.selected)} points, {len(self.selected) - len(self.missing)} finished before"
        guesses = [expected_seconds(point, self._known()) for point in self.missing]
        known = [seconds for seconds in guesses if seconds is not None]
        if self.missing and len(known) == len(self.missing):
            return f"{text}; the rest should take about {clock(sum(known) / self.settings.workers)}"
        return f"{text}; an estimate follows the first one" if self.missing else text

    def run(self) -> AblationOutcome:
        """Runs the missing points and writes the table; Ctrl-C stops them in order, writes it too, raises."""
        outcome = AblationOutcome(self.folder, {}, reused=len(self.selected) - len(self.missing))
        runs = TrialRuns(self.config)
        with TrackedRun(
            self.config,
            name=f"ablation {self.grid.name}",
            command="ablate",
            overrides=[*self.grid.words, *self.own],
            tags={"ablation": self.grid.name},
        ) as parent:
            print(self.headline(), flush=True)
            try:
                outcome.ran = self._work(parent.run_id, runs) if self.missing else 0
            finally:
                runs.close_left_over(parent.run_id, set())
                self._conclude(outcome, parent)
        return outcome

    def _work(self, parent_run_id: str | None, runs: TrialRuns) -> int:
        waiting: queue.SimpleQueue[GridPoint] = queue.SimpleQueue()
        for point in self.missing:
            waiting.put(point)
        finished = 0
        workers = min(self.settings.workers, len(self.missing))
        with AblationScreen(self.grid.name, self.missing, self._known(), workers) as screen:

            def work(gpu: str | None, ended: threading.Event) -> None:
                nonlocal finished
                try:
                    while not self.stop.is_set():
                        try:
                            point = waiting.get_nowait()
                        except queue.Empty:
                            return
                        self._run_point(point, gpu, parent_run_id, runs, screen)
                        finished += 1
                except BaseException as error:  # of a thread: the main one raises it
                    log.error("a worker ended: %s", error, exc_info=error)
                    self._errors.append(error)
                    self.stop.set()
                finally:
                    ended.set()

            ends = [threading.Event() for _ in range(workers)]
            for index, ended in enumerate(ends):
                threading.Thread(target=work, args=(self.gpus[index], ended), name=f"worker {index}").start()
            try:
                while not all(ended.is_set() for ended in ends):
                    time.sleep(LOOK_S)
                    screen.tick()
            finally:  # also Ctrl-C: children write checkpoints
                self.stop.set()
                while not all(ended.is_set() for ended in ends):
                    time.sleep(LOOK_S)
        if self._errors:
            raise self._errors[0]
        return finished

    def _run_point(
        self, point: GridPoint, gpu: str | None, parent: str | None, runs: TrialRuns, screen: AblationScreen
    ) -> None:
        tags = {"ablation": self.grid.name, "seed": str(point.seed)}
        tags |= {f"ablation.{axis}": level for axis, level in point.cell.levels.items()}
        tags |= {"ablation.default": str(point.cell is self.grid.cells[0]).lower()}
        screen.starts(point)
        for attempt in range(self.settings.retries + 1):
            result = run_trial(
                point.words,
                {},
                run_dir=point.folder,
                objective=self.grid.objective,
                gpu=gpu,
                timeout_s=self.settings.point_timeout_s,
                tags=tags | ({PARENT_TAG: parent} if parent else {}),
                name=point.name,
                stop=self.stop,
                grace_s=self.settings.grace_s,
                memory_limit_gb=self.settings.memory_limit_gb,
                threads=self.settings.threads or thread_share(self.settings.workers),
                command=self.command,
            )
            notes = {"sweep.message": result.message} if result.message else {}
            runs.ended(result.run_id, result.state, notes)
            again = result.again or (result.state == INTERRUPTED and not self.stop.is_set())
            if not again or attempt == self.settings.retries:
                break
            screen.say(f"{point.name}: {result.state}, runs again: {result.message}")
        if result.state == INTERRUPTED and self.stop.is_set():
            return  # nothing is known of it: the next call goes on
        self._keep(point, result, screen)

    def _keep(self, point: GridPoint, result: TrialResult, screen: AblationScreen) -> None:
        record = point.store(result)
        self.records[point.key] = record
        screen.ends(point, record, result.last_lines)

    def _conclude(self, outcome: AblationOutcome, parent: TrackedRun) -> None:
        outcome.table = build_table(self.grid, self.records)
        write_json(self.folder / "ablation.json", outcome.table)
        write_atomically(self.folder / "ablation.md", markdown(outcome.table))
        outcome.figure = draw(outcome.table, self.folder / "ablation.png")
        outcome.failures = [
            f"{point.name}: {record['state']}: {record['message']}"
            for point in self.selected
            if (record := self.records.get(point.key)) is not None and record["state"] != FINISHED
        ]
        files = [self.folder / "ablation.json", self.folder / "ablation.md", self.grid.path]
        for path in [*files, *([outcome.figure] if outcome.figure else [])]:
            parent.log_artifact(path, "figures" if path.suffix == ".png" else None)
        states = [record["state"] for record in self.records.values()]
        counts = {"finished": states.count(FINISHED), "failed": len(states) - states.count(FINISHED)}
        parent.log_metrics({f"points/{name}": count for name, count in counts.items()}, step=0)

    def _known(self) -> dict[tuple[str, int], tuple[Any, float]]:
        return {
            point.key: (point.cell, record["seconds"])
            for point in self.points
            if is_finished(record := self.records.get(point.key)) and record is not None
        }


def run_ablation(
    config: Config, overrides: Sequence[str] = (), *, command: Sequence[str] | None = None
) -> AblationOutcome:
    """Runs what is missing of the grid that `config.ablate` names, or only shows it; see `Ablation`."""
    ablation = Ablation(config, overrides, command=command)
    if config.ablate.show:
        print(ablation.overview())
        return AblationOutcome(ablation.folder, build_table(ablation.grid, ablation.records))
    return ablation.run()
