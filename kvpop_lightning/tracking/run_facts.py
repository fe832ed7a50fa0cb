"""What MLflow is told about a run at its start and at its end."""

from __future__ import annotations

import getpass
import os
from typing import Any

from kvpop_lightning.config.schema import Config
from kvpop_lightning.tracking.dvc import dvc_tags
from kvpop_lightning.tracking.environment import git_state


def first_tags(config: Config, name: str, command: str, parent_run_id: str | None) -> dict[str, str]:
    """Who, what, which code and which data."""
    git = git_state()
    return {
        "mlflow.user": user(),
        "mlflow.source.name": f"kvpop {command}".strip(),
        "mlflow.source.type": "LOCAL",
        "mlflow.runName": name,
        "policy": config.policy.name,
        "model": config.model.name,
        "git.dirty": str(git.get("dirty", "unknown")).lower(),
        **({"mlflow.source.git.commit": git["commit"], "commit": git["commit"]} if git else {}),
        **({"mlflow.parentRunId": parent_run_id} if parent_run_id else {}),
        **({"experiment": config.experiment} if config.experiment else {}),
        **config.tracking.tags,
        **dvc_tags(config),
    }


def status_of(kind: type[BaseException] | None, error: BaseException | None) -> str:
    """FINISHED, FAILED or KILLED. Lightning answers Ctrl-C with `sys.exit(1)`: the cause stands in the
    context."""
    if kind is None:
        return "FINISHED"
    seen: set[int] = set()
    cause = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, KeyboardInterrupt) or type(cause).__name__ == "SIGTERMException":
            return "KILLED"
        if not isinstance(cause, SystemExit):
            break  # an ordinary exception: what it came from does not make it an interruption
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return "FINISHED"
    return "FAILED"


def reopen(client: Any, run_id: str) -> bool:
    """Sets a run back to RUNNING; False when it is gone from the server (deleted, or another database)."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise
    if run.info.lifecycle_stage == "deleted":
        return False
    client.update_run(run_id, status="RUNNING")
    return True


def is_rank_zero() -> bool:
    ranks = (os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
    return next((int(rank) == 0 for rank in ranks if rank and rank.isdigit()), True)


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a password entry
        return "unknown"
