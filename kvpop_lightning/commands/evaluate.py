"""`kvpop evaluate`: policies against the dense model on held-out rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpop_lightning.commands import Call
from kvpop_lightning.config.schema import Config

SUMMARY = "measure policies against the dense model on held-out rows"
DETAILS = """Every policy of eval.policies at every budget of eval.budgets: KL, top-1 agreement,
    perplexity, retained attention mass, bytes really held. Writes RUN_DIR/table.json, RUN_DIR/table.md
    and figures; trained policies are read from RUN_DIR/policy. Finished rows are reused by the next call."""
KEYS = (
    "eval.policies",
    "eval.budgets",
    "eval.rows",
    "eval.reference_length",
    "eval.first_position",
    "eval.figures",
    "policy.budget.sink",
    "policy.budget.window",
    "policy.decay",
    "policy.decay_step",
    "policy.equal_bytes",
    "policy.options",
    "data.row_length",
    "data.eval_rows",
    "tracking.enabled",
    "run_dir",
    "seed",
)
DEFAULT_EXPERIMENT: str | None = None


def run(config: Config, call: Call) -> int:
    from kvpop_lightning.evaluation.compare import print_result
    from kvpop_lightning.evaluation.evaluate import evaluate
    from kvpop_lightning.tracking import TrackedRun

    name = " ".join(word for word in (config.tracking.run_name, "evaluate") if word)
    with TrackedRun(config, name=name, command=call.command, overrides=call.overrides) as tracked:
        result = evaluate(config)
        keep_result(tracked, result)
    print_result(result)
    return 0


def keep_result(tracked: Any, result: Any) -> None:
    """Files of an evaluation as artifacts, its main figures as metrics (`kl/<policy>` at step = budget)."""
    for path in result.artifacts:
        tracked.log_artifact(path, "figures" if Path(path).suffix in (".png", ".svg", ".pdf") else None)
    for entry in result.table:
        names = ("kl", "top1", "perplexity", "bytes_held")
        tracked.log_metrics(
            {f"eval/{name}/{entry['policy']}": entry.get(name) for name in names}, step=entry["budget"]
        )
