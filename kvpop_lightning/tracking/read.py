"""Runs as a person asks for them: from the tracking server, or from the run folders where there is none."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvpop_lightning.errors import UserError
from kvpop_lightning.tracking import local
from kvpop_lightning.tracking.naming import flat_params, public_uri
from kvpop_lightning.tracking.outbox import read_outbox
from kvpop_lightning.tracking.store import quiet_mlflow, sqlite_file, tracking_uri, unreachable

PAGE = 1000
HEX = re.compile(r"[0-9a-f]{32}")


@dataclass
class Record:
    """One run."""

    id: str
    name: str
    state: str
    """RUNNING, FINISHED, FAILED, KILLED, or UNKNOWN for a folder that does not say."""
    experiment: str = ""
    started_ms: int | None = None
    ended_ms: int | None = None
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Last values."""
    tags: dict[str, str] = field(default_factory=dict)
    artifacts: str = ""
    """Where they lie."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values; NaN and infinity as text."""
        metrics = {k: v if math.isfinite(v) else str(v) for k, v in self.metrics.items()}
        return asdict(self) | {"metrics": metrics}


@dataclass(frozen=True)
class Query:
    """Which runs."""

    experiment: str | None = None
    sweep: str | None = None
    state: str | None = None
    where: str | None = None
    """A filter in MLflow's syntax; values of params and tags may stand without quotes."""

    def filter(self) -> str:
        parts = [quoted(self.where)] if self.where else []
        if self.sweep:
            parts.append(f"tags.sweep = '{self.sweep}'")
        if self.state:
            parts.append(f"attributes.status = '{self.state.upper()}'")
        return " AND ".join(parts)


def quoted(where: str) -> str:
    """`params.policy.budget.topk = 92` as MLflow wants it, `params.policy.budget.topk = '92'`."""
    pattern = r"((?:params?|parameters?|tags?)\.[^\s=!<>]+\s*(?:!=|=)\s*)([^\s'\"][^\s'\"]*)"
    return re.sub(pattern, r"\1'\2'", where)


class Runs:
    """All that the configured store knows; `source` says which that is.

    Args:
        configured: `tracking.uri`.
        folders: where run folders are looked for when there is no store.

    Raises:
        UserError: neither a store nor run folders.
    """

    def __init__(self, configured: str | None, folders: Sequence[Path]) -> None:
        self.uri = tracking_uri(configured)
        file = sqlite_file(self.uri)
        self.missing = unreachable(self.uri) or (
            f"{file} does not exist" if file is not None and not file.exists() else None
        )
        self.client: Any = None
        self._local: list[Record] = []
        if self.missing is None:
            from mlflow.tracking import MlflowClient

            quiet_mlflow()
            self.client = MlflowClient(self.uri)
            self.source = public_uri(self.uri)
            return
        self._local = [record for folder in folders for record in local_records(folder)]
        self._local = list({record.id: record for record in self._local}.values())
        if not self._local:
            looked = ", ".join(str(folder) for folder in folders)
            raise UserError(f"no runs: {self.missing}, and there is no run folder in {looked}")
        self.source = f"run folders ({self.missing})"

    def find(self, query: Query = Query()) -> list[Record]:
        """Runs that the query wants, newest first.

        Raises:
            UserError: no such experiment, or a filter that MLflow does not understand.
        """
        found = self._search(query) if self.client is not None else self._filter(query)
        return sorted(found, key=lambda record: -(record.started_ms or 0))

    def one(self, name: str) -> Record:
        """The run with this id, the beginning of an id, or this name.

        Raises:
            UserError: none, or several.
        """
        if self.client is not None and HEX.fullmatch(name):
            from mlflow.exceptions import MlflowException

            try:
                return _record(self.client.get_run(name), self._experiments())
            except MlflowException as error:
                raise UserError(f"there is no run {name} in {self.source}") from error
        known = self.find()
        found = [record for record in known if record.id == name]
        found = found or [record for record in known if record.id.startswith(name)]
        found = found or [record for record in known if record.name == name]
        if not found:
            raise UserError(f"there is no run {name} in {self.source}: kvpop runs list shows what there is")
        if len(found) > 1:
            some = ", ".join(f"{record.id[:8]} ({record.name})" for record in found[:5])
            raise UserError(f"{name} may mean {len(found)} runs: {some}: give more of the id")
        return found[0]

    def artifact_names(self, record: Record) -> list[str]:
        """Paths of a run's artifacts, folders with a slash at the end; empty for a local run."""
        if self.client is None:
            return []

        def below(folder: str | None) -> list[str]:
            names: list[str] = []
            for item in self.client.list_artifacts(record.id, folder):
                names += below(item.path) if item.is_dir else [item.path]
            return names

        return below(None)

    def _experiments(self) -> dict[str, str]:
        found: dict[str, str] = {}
        token = None
        while True:
            page = self.client.search_experiments(max_results=PAGE, page_token=token)
            found |= {item.experiment_id: item.name for item in page}
            if not (token := page.token):
                return found

    def _search(self, query: Query) -> list[Record]:
        experiments = self._experiments()
        chosen = [key for key, name in experiments.items() if query.experiment in (None, name)]
        if not chosen:
            known = ", ".join(sorted(experiments.values()))
            raise UserError(f"{self.source} has no experiment {query.experiment} (known: {known})")
        found: list[Record] = []
        token = None
        while True:
            page = _understood(
                lambda: self.client.search_runs(
                    chosen, filter_string=query.filter(), max_results=PAGE, page_token=token
                ),
                query,
            )
            found += [_record(run, experiments) for run in page]
            if not (token := page.token):
                return found

    def _filter(self, query: Query) -> list[Record]:
        """MLflow's own filter on what the run folders hold."""
        from mlflow.utils.search_utils import SearchUtils

        runs = [_as_mlflow(r) for r in self._local if query.experiment in (None, r.experiment)]
        kept = {
            run.info.run_id for run in _understood(lambda: SearchUtils.filter(runs, query.filter()), query)
        }
        return [record for record in self._local if record.id in kept]


def _understood(search: Callable[[], Any], query: Query) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        return search()
    except MlflowException as error:
        if error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        raise UserError(f"--where {query.where}: {' '.join(str(error).split())[:300]}") from error


def _record(run: Any, experiments: dict[str, str]) -> Record:
    return Record(
        id=run.info.run_id,
        name=run.info.run_name or "",
        state=run.info.status,
        experiment=experiments.get(run.info.experiment_id, run.info.experiment_id),
        started_ms=run.info.start_time,
        ended_ms=run.info.end_time,
        params=dict(run.data.params),
        metrics=dict(run.data.metrics),
        tags=dict(run.data.tags),
        artifacts=run.info.artifact_uri or "",
    )


def _as_mlflow(record: Record) -> Any:
    from mlflow.entities import Metric, Param, Run, RunData, RunInfo, RunTag

    info = RunInfo(
        run_id=record.id,
        experiment_id="0",
        user_id="",
        status=record.state,
        start_time=record.started_ms or 0,
        end_time=record.ended_ms,
        lifecycle_stage="active",
        run_name=record.name,
    )
    data = RunData(
        metrics=[Metric(name, value, 0, 0) for name, value in record.metrics.items()],
        params=[Param(name, text) for name, text in record.params.items()],
        tags=[RunTag(name, text) for name, text in record.tags.items()],
    )
    return Run(info, data)


def local_records(root: Path) -> list[Record]:
    """The runs in the run folders below `root`: one for each key that logged anything."""
    found = []
    for config_file in sorted(root.rglob("config.yaml")):
        folder = config_file.parent
        if folder.parent.name != "children" and (folder / "overrides.txt").exists():
            found += _of_folder(folder, config_file)
    return found


def _of_folder(folder: Path, config_file: Path) -> list[Record]:
    try:
        config = yaml.safe_load(config_file.read_text(encoding="utf-8"))
        params = flat_params(config)
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return []
    ids, waiting = local.stored_runs(folder), read_outbox(folder)
    by_key: dict[str, list[tuple[str, float, int, int]]] = {}
    for line in _lines(folder):
        by_key.setdefault(line[0], []).append(line[1:])
    keys = list(dict.fromkeys([*ids, *waiting, *by_key])) or [folder.name]
    records = []
    for key in keys:
        values = by_key.get(key, [])
        times = [value[2] for value in values]
        state = waiting[key].status if key in waiting else None
        records.append(
            Record(
                id=ids.get(key) or f"{folder}:{key}",
                name=key,
                state=state or "UNKNOWN",
                experiment=str(config.get("tracking", {}).get("experiment", "")),
                started_ms=min(times, default=round(config_file.stat().st_mtime * 1000)),
                ended_ms=max(times, default=None),
                params=params,
                metrics={name: value for name, value, _, _ in values},
                tags={"policy": str(config.get("policy", {}).get("name", "")), **_job_tags(folder)},
                artifacts=str(folder),
            )
        )
    return records


def _lines(folder: Path) -> list[tuple[str, str, float, int, int]]:
    """(run, name, value, time in ms, step) of metrics.jsonl."""
    found = []
    runs = {key for line in _jsonl(folder / local.METRICS_FILE) if isinstance(key := line.get("run"), str)}
    for run in sorted(runs):
        found += [(run, *value) for value in local.local_metrics(folder, run)]
    return found


def _jsonl(file: Path) -> list[dict[str, Any]]:
    entries = []
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def _job_tags(folder: Path) -> dict[str, str]:
    """What a sweep noted about its trial."""
    try:
        tags = json.loads((folder / "job.json").read_text(encoding="utf-8")).get("tags", {})
    except (OSError, ValueError, AttributeError):
        return {}
    return {str(name): str(text) for name, text in tags.items()}
