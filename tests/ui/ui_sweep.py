"""A small sweep in a run database: a parent with a figure, and children with three searched parameters."""

from __future__ import annotations

from pathlib import Path

from kvpop_lightning.config import compose
from kvpop_lightning.tracking import TrackedRun

POINTS = [(92, 0.7, 1.5), (188, 0.5, 0.5), (28, 0.9, 2.0), (60, 0.8, 0.25), (124, 0.6, 4.0)]
"""topk, decay, temperature."""


def make_sweep(folder: Path) -> TrackedRun:
    """Writes `folder`/mlflow.db (the working folder's project is `folder`)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3))
    axes.scatter([topk for topk, _, _ in POINTS], [loss(*point) for point in POINTS])
    axes.set(xlabel="policy.budget.topk", ylabel="KL", title="sweep budget_decay")
    figure.savefig(folder / "kl_by_budget.png", dpi=100, bbox_inches="tight")
    plt.close(figure)
    words = ["experiment=smoke", "tracking.system_metrics=false", "tracking.experiment=sweeps"]
    config = compose([*words, f"run_dir={folder}/runs/sweep"])
    with TrackedRun(config, name="sweep budget_decay", tags={"sweep": "budget_decay"}) as parent:
        parent.log_artifact(folder / "kl_by_budget.png", "figures")
        for number, point in enumerate(POINTS):
            topk, decay, temperature = point
            own = [
                f"policy.budget.topk={topk}",
                f"policy.decay={decay}",
                f"distill.temperature={temperature}",
            ]
            place = f"run_dir={folder}/runs/sweep/trials/{number:04d}"
            tags = {"mlflow.parentRunId": str(parent.run_id), "sweep": "budget_decay", "trial": str(number)}
            # The smoke test's rows are short: the budgets are only written, nothing is trained.
            child = compose([*words, "data.row_length=1024", "eval.budgets=[256]", *own, place])
            with TrackedRun(child, name=f"trial {number}", tags=tags) as run:
                for step in range(5):
                    run.log_metrics({"train/loss": 1 / (step + 1) + 0.1 * number}, step=step)
                run.log_metrics({"kl": loss(*point)}, step=5)
    return parent


def loss(topk: int, decay: float, temperature: float) -> float:
    return 20 / topk + (decay - 0.7) ** 2 + 0.01 * abs(temperature - 1)
