"""What a run must note to be repeated: code, packages, machine; and the files it writes into its folder."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from kvpop_lightning.config.compose import to_yaml
from kvpop_lightning.config.schema import Config

MAX_DIFF_BYTES = 2_000_000
SOURCE_FOLDER = Path(__file__).resolve().parents[2]


def environment() -> dict[str, Any]:
    """Python, platform, git state and the versions of all installed packages, as plain JSON values."""
    git = git_state()
    git.pop("diff", None)
    return {
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "accelerators": _accelerators(),
        "git": git,
        "packages": package_versions(),
    }


def package_versions() -> dict[str, str]:
    """Every installed distribution with its version, by lower-case name."""
    found = {
        dist.metadata["Name"]: dist.version for dist in metadata.distributions() if dist.metadata["Name"]
    }
    return {name.lower(): found[name] for name in sorted(found, key=str.lower)}


def git_state(folder: Path = SOURCE_FOLDER) -> dict[str, Any]:
    """`commit`, `dirty` and `diff` (against the commit, text, bounded) of the source; empty outside a
    checkout."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {}
    status = _git(folder, "status", "--porcelain", "--untracked-files=normal") or ""
    diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff") or ""
    if len(diff.encode()) > MAX_DIFF_BYTES:
        diff = diff.encode()[:MAX_DIFF_BYTES].decode(errors="ignore") + "\n[cut]\n"
    untracked = [line[3:] for line in status.splitlines() if line.startswith("??")]
    return {"commit": commit.strip(), "dirty": bool(status.strip()), "untracked": untracked, "diff": diff}


def write_run_folder(config: Config, overrides: Sequence[str] = (), command: str = "") -> list[Path]:
    """Writes config.yaml, environment.json, git.diff (a changed checkout) and a line of overrides.txt.

    `overrides.txt` keeps one line per command that ran in this folder; the other files are the latest
    command's.
    """
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    config_file = write_atomically(folder / "config.yaml", to_yaml(config))
    environment_file = write_atomically(
        folder / "environment.json", json.dumps(environment(), indent=1) + "\n"
    )
    overrides_file = folder / "overrides.txt"
    words = " ".join([command, *overrides]).strip() or "(defaults)"
    with overrides_file.open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {' '.join(words.split())}\n")
    written = [config_file, overrides_file, environment_file]
    diff_file = folder / "git.diff"
    if diff := git_state().get("diff"):
        written.append(write_atomically(diff_file, diff))
    else:
        diff_file.unlink(missing_ok=True)  # it would belong to an earlier command
    return written


def write_atomically(path: Path, text: str) -> Path:
    """Writes beside and renames: a reader, or a run that is killed here, never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, errors="replace", timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _accelerators() -> list[str]:
    """Names of the CUDA devices when torch is loaded already; loading it only for this would cost seconds."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def required_versions(extra: str | None = None) -> dict[str, str]:
    """Packages the project asks for, with their version range as pyproject.toml states it (`extra`: that
    set)."""
    found = {}
    for line in _requirements(extra):
        name = re.match(r"[A-Za-z0-9._-]+", line)
        assert name is not None, line
        found[name.group(0)] = line[name.end() :].strip()
    return found


def _requirements(extra: str | None) -> list[str]:
    project = SOURCE_FOLDER / "pyproject.toml"
    if project.is_file():  # a checkout that runs without being installed has no metadata
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        return list(table["optional-dependencies"].get(extra, []) if extra else table["dependencies"])
    found = []
    for line in metadata.requires("kvpop-lightning") or []:
        requirement, _, marker = line.partition(";")
        wanted = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        if (wanted.group(1) if wanted else None) == extra:
            found.append(requirement.strip())
    return found
