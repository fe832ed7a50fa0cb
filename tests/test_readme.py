"""Every command and example of README.md runs: each block there is executed here."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
# Commands on the real model take minutes: under `make test-all`.
ON_THE_REAL_MODEL = ("experiment=demo", "make demo")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def _commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for block in _blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _is_slow(command: str) -> bool:
    return any(mark in command for mark in ON_THE_REAL_MODEL) and "--print-config" not in command


def _run(words: list[str], timeout: int = 600) -> str:
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all commands: later ones find what earlier ones left, a user's model and data too."""
    from kvpop_lightning.config.schema import ModelConfig
    from kvpop_lightning.data.sample import sample_text
    from kvpop_lightning.models import load_model

    folder = tmp_path_factory.mktemp("readme")
    model, tokenizer = load_model(ModelConfig(source="tiny-qwen3", device="cpu", dtype="float32"))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with (folder / "data.jsonl").open("w") as file:
        for seed in range(12):
            text = sample_text("mixed", seed=seed, min_tokens=200)
            file.write(json.dumps({"problem": f"Question {seed}: what follows?", "solution": text}) + "\n")
    return folder


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _in_test(command: str, place: Path) -> list[str]:
    """The command as typed, with paths filled in, results kept out of the repository, and small sizes."""
    filled = command.replace("MODEL_FOLDER", str(place / "model")).replace(
        "DATA.jsonl", str(place / "data.jsonl")
    )
    words = shlex.split(filled)
    assert words[0] in ("kvpop", "make"), f"README has a command that this test cannot run: {command}"
    if words[0] == "make":
        # `make test` would run this test again, `make ui` never ends: their recipes are checked;
        # `make demo` has its own test.
        return ["make", "--dry-run", *words[1:]]
    words = [sys.executable, "-m", "kvpop_lightning.cli", *words[1:]]
    if "--help" in words or "--print-config" in words or words[3] == "doctor":
        return words
    words += [f"tracking.uri=sqlite:///{place}/mlflow.db", f"data.cache_dir={place}/data"]
    if words[3] == "sweep":  # makes the study; tests/sweeps/test_sweep_real.py runs this sweep to its end
        return [
            "env",
            "-C",
            str(_folder(place / "sweep" / "configs").parent),
            *words,
            "workers=0",
        ]
    run_dir = next((w.split("=")[1] for w in words if w.startswith("run_dir=")), None)
    if "experiment=demo" not in command:
        words = [w for w in words if not w.startswith("run_dir=")]
        words += [f"run_dir={place}/{run_dir or 'run'}", f"trainer.feature_cache_dir={place}/features"]
    if "MODEL_FOLDER" in command:
        words += [
            "trainer.max_steps=2",
            "data.row_length=256",
            "data.train_rows=2",
            "data.eval_rows=1",
            "eval.rows=1",
        ]
        words += [
            "eval.reference_length=256",
            "eval.budgets=[64]",
            "data.min_document_tokens=16",
            "model.device=cpu",
        ]
        words += [
            "data.eval_single_document=false",
            "policy.budget.topk=24",
            "policy.scorer.memory_dim=4",
            "policy.scorer.value_dim=4",
        ]
    return words


def test_the_two_commands_are_make_demo_and_make_test() -> None:
    assert {"make demo", "make test"} <= set(_commands())


@pytest.mark.parametrize("command", [c for c in _commands() if not _is_slow(c)])
def test_command(command: str, place: Path) -> None:
    _run(_in_test(command, place))


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.parametrize("command", [c for c in _commands() if _is_slow(c) and not c.startswith("make")])
def test_command_on_the_real_model(command: str, place: Path) -> None:
    _run(_in_test(command, place))


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.timeout(1800)
def test_make_demo(place: Path) -> None:
    run_dir = place / "demo"
    settings = f"run_dir={run_dir} tracking.uri=sqlite:///{place}/mlflow.db"
    words = ["make", "demo", "VENV=system", f"PYTHON={sys.executable}", f"ARGS={settings}"]
    printed = _run(words, timeout=1700)
    table = json.loads((run_dir / "table.json").read_text())
    wanted = {"policy", "compression", "budget", "kl", "top1", "perplexity", "bytes_held"}
    assert all(wanted <= set(entry) for entry in table)
    assert "make ui" in printed
    kl = {(entry["policy"], entry["budget"]): entry["kl"] for entry in table}
    for budget in (256, 128, 64):
        learned = min(kl["kvpop_mlp", budget], kl["kvpop_mlstm", budget])
        assert kl["oracle", budget] < learned
        for control in ("streaming_llm", "random", "key_norm", "random+decay", "key_norm+decay"):
            assert learned < kl[control, budget], (control, budget)


def test_python_example(place: Path, tmp_path: Path) -> None:
    (example,) = _blocks("python")
    assert len(example.strip().splitlines()) <= 15
    script = f"PATH = {str(place / 'model')!r}\n" + example
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
