"""A study's report: `report.html`, figures and `report.json` in the sweep's folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvpop_lightning.config.schema import Config
from kvpop_lightning.evaluation.store import write_json
from kvpop_lightning.sweeps import study as studies
from kvpop_lightning.sweeps.report_data import summary, view_of
from kvpop_lightning.sweeps.report_figures import draw_all
from kvpop_lightning.sweeps.report_html import page
from kvpop_lightning.sweeps.spec import load_sweep
from kvpop_lightning.sweeps.storage import open_storage, storage_address
from kvpop_lightning.tracking.environment import write_atomically
from kvpop_lightning.tracking.store import Store, tracking_uri

log = logging.getLogger(__name__)

FOLDER = "report"


def write_report(study: Any, name: str, metrics: Sequence[str], folder: Path) -> list[Path]:
    """Writes what the study holds, however little that is; returns the files.

    Args:
        study: an Optuna study.
        name: of the sweep, for the title.
        metrics: names of the study's values, in its order.
        folder: files go to `<folder>/report`.
    """
    place = folder / FOLDER
    view = view_of(study, metrics)
    found = summary(view, name)
    write_json(place / "report.json", found)
    paths = [place / "report.json", *draw_all(view, found, place)]
    try:
        paths.insert(0, write_atomically(place / "report.html", page(view, found)))
    except ImportError:
        log.warning("no report.html: plotly is missing (pip install plotly)")
    return paths


def report_files(study: Any, name: str, metrics: Sequence[str], folder: Path) -> list[Path]:
    """`write_report` for the end of a sweep, whose result no broken figure may cost."""
    try:
        return write_report(study, name, metrics, folder)
    except Exception as error:
        log.warning("no report: %s", error, exc_info=error)
        return []


def report_sweep(config: Config) -> list[Path]:
    """`kvpop sweep NAME --report`: the report of a study as it is now, also while it runs.

    Raises:
        UserError: there is no such sweep or study.
    """
    sweep = load_sweep(config.sweep.name or "")
    folder = Path(config.run_dir)
    address = storage_address(config.sweep.storage, folder)
    storage = open_storage(address, config.sweep.heartbeat_s)
    study = studies.join_study(storage, config.sweep.study or sweep.name, address, wait_s=1.0)
    paths = write_report(study, sweep.name, sweep.objective.metrics, folder)
    run_id = study.user_attrs.get(studies.PARENT_RUN)
    if config.tracking.enabled and run_id is not None:
        store = Store(tracking_uri(config.tracking.uri), config.tracking.experiment)
        for path in paths:
            keep = partial(_keep_artifact, run_id=run_id, path=path)
            store.call(f"artifact {path.name}", keep)
    return paths


def _keep_artifact(client: Any, run_id: str, path: Path) -> None:
    client.log_artifact(run_id, str(path), FOLDER)
