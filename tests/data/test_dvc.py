"""The stages of `dvc.yaml` run by DVC itself: once, not again, in part, and fetched by another checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
DVC = os.environ.get("DVC") or shutil.which("dvc", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
NOTHING = "Data and pipelines are up to date."
SMALLER = {"train_rows": 3, "eval_rows": 2, "families": ["ledger"], "eval_families": ["codebook"]}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DVC, reason="dvc is not installed: pip install -e '.[dvc]', or set DVC to it"),
    pytest.mark.skipif(not (BIN / "kvpop").exists(), reason="the command kvpop is not installed"),
]


def call(folder: Path, *words: str) -> str:
    """Runs a command with this package in front; returns what it printed."""
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "DVC_NO_ANALYTICS": "1",
        "DVC_SITE_CACHE_DIR": str(folder.parent / "site"),
        "HOME": str(folder.parent),  # nobody's global configuration of git or DVC
    }
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def dvc(folder: Path, *words: str) -> str:
    return call(folder, str(DVC), *words)


def commit(folder: Path, message: str) -> None:
    call(folder, "git", "add", "-A")
    call(folder, "git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "-m", message)


def outputs(folder: Path) -> dict[str, str]:
    """Hashes of what the stages have written."""
    run = folder / "runs" / "smoke"
    files = [run / "table.json", run / "metrics.json"]
    for name in ("data", "policy", "checkpoints", "report"):
        files += [path for path in sorted((run / name).rglob("*")) if path.is_file()]
    return {str(path.relative_to(run)): sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with the toy experiment's settings as parameters, and DVC in it."""
    folder = tmp_path / "project"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvpop_lightning", folder / "kvpop_lightning", ignore=ignored)
    shutil.copytree(ROOT / "configs", folder / "configs", ignore=shutil.ignore_patterns("local.yaml"))
    for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    printed = call(folder, str(BIN / "kvpop"), "train", "experiment=smoke", "--print-config")
    params = yaml.safe_load(printed)
    params["data"] |= SMALLER
    params["eval"] |= {"policies": ["full", "streaming_llm", "kvpop_mlp"], "figures": False}
    params["train_policies"], params["trainer"]["max_steps"] = ["kvpop_mlp"], 2
    (folder / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    call(folder, "git", "init", "-q")
    dvc(folder, "init", "-q")
    commit(folder, "start")
    return folder


def test_the_pipeline_runs_once_in_part_and_travels(project: Path) -> None:
    first = dvc(project, "repro")
    assert [f"Running stage '{name}'" in first for name in ("prepare", "train", "evaluate", "report")] == [
        True
    ] * 4
    made = outputs(project)
    assert {name.split("/")[0] for name in made} == {
        "data", "policy", "checkpoints", "report", "table.json", "metrics.json"
    }  # fmt: skip
    lock = yaml.safe_load((project / "dvc.lock").read_text())["stages"]

    # A second time nothing runs and nothing changes.
    second = dvc(project, "repro")
    assert NOTHING in second
    assert "Running stage" not in second
    assert outputs(project) == made

    # The tracked run of the training names the hash of the rows it read.
    script = (
        "import mlflow; mlflow.set_tracking_uri('sqlite:///mlflow.db');"
        "runs = mlflow.search_runs(search_all_experiments=True, output_format='list');"
        "print(sorted({r.data.tags.get('dvc.data', '') for r in runs}))"
    )
    assert lock["prepare"]["outs"][0]["md5"] in call(project, sys.executable, "-c", script)

    # An experiment with another parameter, which reaches the command and reruns what depends on it, no more.
    third = dvc(project, "exp", "run", "-n", "three", "-S", "trainer.max_steps=3")
    assert [f"Running stage '{name}'" in third for name in ("prepare", "train", "evaluate")] == [
        False,
        True,
        True,
    ]
    assert "3/3" in third
    now = outputs(project)
    assert {name for name in made if name.startswith("data/") and made[name] == now.get(name)} == {
        name for name in made if name.startswith("data/")
    }
    assert now["policy/kvpop_mlp/kvpop.safetensors"] != made["policy/kvpop_mlp/kvpop.safetensors"]

    # Its figures are DVC's metrics, also beside those of other experiments.
    table = {e["policy"]: e for e in json.loads((project / "runs/smoke/table.json").read_text())}
    shown = json.loads(dvc(project, "metrics", "show", "--json"))[""]["data"]["runs/smoke/metrics.json"][
        "data"
    ]
    assert shown["kvpop_mlp"]["32"]["kl"] == table["kvpop_mlp"]["kl"]
    assert "kvpop_mlp.32.kl" in dvc(project, "exp", "show", "--csv")

    # Another checkout gets the same bytes from a remote, and has nothing left to do.
    store = project.parent / "store"
    dvc(project, "remote", "add", "-q", "-d", "store", str(store))
    commit(project, "three steps")
    dvc(project, "push")
    other = project.parent / "other"
    call(project, "git", "clone", "-q", str(project), str(other))
    assert not (other / "runs").exists()
    dvc(other, "pull")
    assert outputs(other) == now
    assert NOTHING in dvc(other, "repro")
    shutil.rmtree(other / "runs")
    shutil.rmtree(other / ".dvc" / "cache")
    shutil.rmtree(store)
    missing = subprocess.run([str(DVC), "pull"], cwd=other, capture_output=True, text=True)
    assert missing.returncode != 0, "a pull from an empty remote must not pass for whole"
