"""Hashes of what a run used, as DVC recorded them in `dvc.lock` and `.dvc` files; DVC is not needed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from hashlib import md5
from pathlib import Path
from typing import Any

import yaml

from kvpop_lightning.config.files import project_folder
from kvpop_lightning.config.schema import Config

LOCK = "dvc.lock"


def dvc_tags(config: Config, folder: Path | None = None) -> dict[str, str]:
    """Tags for a run of `config`; empty where DVC tracks nothing of it.

    `dvc.data` is the hash of `data.path`, else of `data.cache_dir`; `dvc.eval_data`, `dvc.model` and
    `dvc.policy` those of `data.eval_path`, `model.path` and `run_dir/policy`; `dvc.params` is a hash of all
    parameter values in `dvc.lock`, `dvc.lock` that of the file. `dvc.changed` names which of them have
    another size on the disk than DVC noted: the run used something newer than the hash says.

    Args:
        folder: where `dvc.lock` lies; None = the project folder.
    """
    folder = (folder or project_folder()).resolve()
    lock = _mapping(folder / LOCK)
    stages = [stage for stage in _values(lock.get("stages")) if isinstance(stage, Mapping)]
    recorded: dict[Path, Mapping[str, Any]] = {}
    for part in ("deps", "outs"):  # what a stage wrote is newer than what an earlier one read
        for stage in stages:
            recorded |= {_absolute(folder, entry): entry for entry in _entries(stage.get(part))}
    used = {
        "data": config.data.path or config.data.cache_dir,
        "eval_data": config.data.eval_path,
        "model": config.model.path,
        "policy": str(Path(config.run_dir) / "policy"),
    }
    tags, changed = {}, []
    for name, path in used.items():
        if not path:
            continue
        place = Path(os.path.abspath(folder / path))
        entry = _from_dvc_file(place) or recorded.get(place)
        if entry is None:
            continue
        tags[f"dvc.{name}"] = str(entry["md5"])
        if (size := entry.get("size")) is not None and place.exists() and _size(place) != size:
            changed.append(name)
    params = [stage["params"] for stage in stages if stage.get("params")]
    if params:
        text = json.dumps(params, sort_keys=True, default=str)
        tags["dvc.params"] = md5(text.encode(), usedforsecurity=False).hexdigest()
    if stages:
        tags[LOCK] = md5((folder / LOCK).read_bytes(), usedforsecurity=False).hexdigest()
    return tags | ({"dvc.changed": ",".join(changed)} if changed else {})


def _from_dvc_file(place: Path) -> Mapping[str, Any] | None:
    """The entry of the file `place.dvc` beside it, which `dvc add` writes."""
    for entry in _entries(_mapping(place.with_name(place.name + ".dvc")).get("outs")):
        if str(entry["path"]) == place.name:
            return entry
    return None


def _mapping(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # no file, or none that DVC would read
        return {}
    return content if isinstance(content, dict) else {}


def _values(table: Any) -> list[Any]:
    return list(table.values()) if isinstance(table, Mapping) else []


def _entries(found: Any) -> Iterator[Mapping[str, Any]]:
    for entry in found if isinstance(found, list) else []:
        if isinstance(entry, Mapping) and "path" in entry and "md5" in entry:
            yield entry


def _absolute(folder: Path, entry: Mapping[str, Any]) -> Path:
    return Path(os.path.abspath(folder / str(entry["path"])))


def _size(place: Path) -> int:
    """Bytes, a folder's as DVC counts them: all files below it."""
    if place.is_file():
        return place.stat().st_size
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
