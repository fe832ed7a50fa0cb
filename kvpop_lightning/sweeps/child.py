"""The process of one trial: `python -m kvpop_lightning.sweeps.child JOB.json`; see `exit_codes`."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import ConfigError, Terminated, UserError
from kvpop_lightning.sweeps import exit_codes
from kvpop_lightning.sweeps.files import RESULT_FILE, STOP_FILE, write_json
from kvpop_lightning.sweeps.objective import Objective
from kvpop_lightning.sweeps.point import trial_config
from kvpop_lightning.sweeps.space import Point


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job in the file and returns the exit status; the reason of a failure goes to `result.json`."""
    (path,) = sys.argv[1:] if argv is None else argv
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    folder = Path(job["run_dir"])
    try:
        if job.get("memory_limit_gb"):
            _limit_memory(job["memory_limit_gb"])
        result = run_job(job)
    except BaseException as error:
        code = exit_code_of(error, asked_to_stop=(folder / STOP_FILE).exists())
        if code in (exit_codes.FAILED, exit_codes.OUT_OF_MEMORY, exit_codes.DIVERGED):
            traceback.print_exception(error)
        message = message_of(error, code)
        print(f"{exit_codes.MEANING[code]}: {message}", flush=True)
        if _is_rank_zero():
            write_json(folder / RESULT_FILE, {"values": {}, "message": message})
        return code
    if _is_rank_zero():
        write_json(folder / RESULT_FILE, result)
    return exit_codes.FINISHED


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Trains and measures one point; returns `values`, `rows` and `steps`.

    Raises:
        ConfigError: the point cannot be.
        DivergedError: NaN or infinity.
    """
    parent = os.getppid()
    objective = Objective.from_dict(job["objective"])
    point: Point = job["point"]
    config = trial_config(
        job["words"], point, objective, job["run_dir"]
    )  # before torch: a bad point ends soon

    from kvpop_lightning.sweeps.callbacks import DivergedError, StopWatch
    from kvpop_lightning.tracking import TrackedRun

    words = [*job["words"], *(f"{key}={value}" for key, value in point.items())]
    watch = StopWatch(Path(job["run_dir"]) / STOP_FILE, parent)
    with TrackedRun(
        config, name=job["name"], command="sweep", overrides=words, tags=job.get("tags", {})
    ) as run:
        watch.start()
        try:
            result = _train_and_measure(config, objective, job.get("measure", {}), run, watch)
        finally:
            watch.close()
        prefix = job.get("measure", {}).get("prefix", "")
        run.log_metrics({f"{prefix}{n}": v for n, v in result["values"].items()}, step=result["steps"])
        wrong = [name for name, value in result["values"].items() if not math.isfinite(value)]
        if wrong:
            raise DivergedError(f"{wrong[0]} is {result['values'][wrong[0]]}")
    return result


def _train_and_measure(
    config: Config, objective: Objective, measure: dict[str, Any], run: Any, watch: Any
) -> dict[str, Any]:
    from kvpop_lightning.data import PackedMathDataModule
    from kvpop_lightning.models import load_model
    from kvpop_lightning.sweeps.callbacks import FiniteLoss, MeasureObjective, StopOnRequest
    from kvpop_lightning.training.fit import train

    frozen = config.trainer.base == "frozen"
    model, tokenizer = load_model(config.model, train_base=not frozen)
    rows_per_step = config.trainer.rows_per_step * config.trainer.accumulate
    data = PackedMathDataModule(config.data, tokenizer, rows_per_step=rows_per_step, seed=config.seed)
    data.prepare_data()
    data.setup("fit")
    data.setup("validate")
    callbacks: list[Any] = [StopOnRequest(watch), FiniteLoss(config.trainer.log_every)]
    if frozen and measure.get("every"):
        callbacks.append(
            MeasureObjective(
                config,
                model,
                data.eval_rows,
                measure.get("rows", 1),
                measure["every"],
                lambda metrics, step: run.log_metrics(metrics, step=step),
            )
        )
    trained = train(config, model=model, tokenizer=tokenizer, data=data, run=run, callbacks=callbacks)
    # A base that was trained is no teacher any more: the evaluation loads its own.
    shared = {"model": model, "tokenizer": tokenizer} if frozen else {}
    for entry in _entries(config, data, shared, objective, run, by_row=bool(measure.get("by_row"))):
        last, *others = entry
    values = {
        name: float(trained.metrics.get("seconds", trained.seconds))
        if name == "seconds"
        else _number(last[name])
        for name in objective.metrics
    }
    names = [name for name in objective.metrics if name in last["rows"][0]]
    rows = {name: [float(row[name]) for row in last["rows"]] for name in names}
    for other in others:
        at = f"@{other['budget']}"
        values |= {n + at: _number(other[n]) for n in objective.metrics if n != "seconds"}
        rows |= {n + at: [float(row[n]) for row in other["rows"]] for n in names}
    return {"values": values, "rows": rows, "steps": trained.steps}


def _entries(
    config: Config, data: Any, shared: dict[str, Any], objective: Objective, run: Any, *, by_row: bool
) -> Iterator[list[dict[str, Any]]]:
    """The policy's entries of the comparison table, one per budget in the objective's order; `by_row`: after
    each row, reported by the row's number."""
    from kvpop_lightning.evaluation.evaluate import evaluate

    for count in range(1 if by_row else objective.rows, objective.rows + 1):
        part = replace(config, eval=replace(config.eval, rows=count))
        table = evaluate(part, [config.policy.name], data=data, progress=False, **shared).table
        entries = [entry for total in config.eval.budgets for entry in table if entry["budget"] == total]
        if by_row:
            row = entries[0]["rows"][-1]
            names = [name for name in objective.metrics if name in row]
            run.log_metrics({f"objective_row/{name}": row[name] for name in names}, step=count - 1)
        yield entries


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def exit_code_of(error: BaseException, *, asked_to_stop: bool) -> int:
    """The exit status that says what `error` means for the sweep."""
    chain = list(_chain(error))
    if any(_is_memory(cause) for cause in chain):
        return exit_codes.OUT_OF_MEMORY
    if isinstance(error, KeyboardInterrupt | SystemExit):
        if asked_to_stop:
            return exit_codes.STOPPED
        return exit_codes.TERMINATED if isinstance(error, Terminated) else exit_codes.INTERRUPTED
    if any(type(cause).__name__ == "DivergedError" for cause in chain):
        return exit_codes.DIVERGED
    if isinstance(error, ConfigError):
        return exit_codes.INVALID
    if any(isinstance(cause, OSError) for cause in chain):
        return exit_codes.FAILED
    return (
        exit_codes.INVALID
        if isinstance(error, UserError) or _is_our_value_error(error)
        else exit_codes.FAILED
    )


def message_of(error: BaseException, code: int) -> str:
    """One line about it."""
    if code == exit_codes.STOPPED:
        return "the checkpoint is written"
    text = " ".join(str(error).split()) or type(error).__name__
    known = isinstance(error, UserError) or code in (exit_codes.DIVERGED, exit_codes.INVALID)
    return (text if known else f"{type(error).__name__}: {text}")[:1000]


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text or "cannot allocate memory" in text or "out of memory" in text
    )


def _is_our_value_error(error: BaseException) -> bool:
    """By the house rule our own code raises a plain ValueError only for impossible settings."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    package = str(Path(__file__).resolve().parents[1])
    return (
        type(error) is ValueError
        and trace is not None
        and trace.tb_frame.f_code.co_filename.startswith(package)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _limit_memory(gigabytes: float) -> None:
    limit = int(gigabytes * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _is_rank_zero() -> bool:
    from kvpop_lightning.tracking.mlflow_run import _is_rank_zero as rank_zero

    return rank_zero()


if __name__ == "__main__":
    sys.exit(main())
