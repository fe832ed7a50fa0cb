"""Commands that take a bare word and flags of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvpop_lightning.cli import main
from kvpop_lightning.commands import Call
from kvpop_lightning.commands import sweep as command
from kvpop_lightning.config.schema import Config


def test_a_name_a_flag_and_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[Config, Call]] = []
    monkeypatch.setattr(command, "run", lambda config, call: seen.append((config, call)) or 0)
    assert main(["--worker", "sweep", "workers=2", "smoke", "storage=x.db", "seed=3"]) == 0
    config, call = seen[0]
    assert (config.sweep.name, config.sweep.worker, config.sweep.workers) == ("smoke", True, 2)
    assert (config.sweep.storage, config.seed) == ("x.db", 3)
    assert config.experiment == "smoke"  # what the sweep's file fixes
    assert config.run_dir == "runs/sweeps/smoke"
    assert "sweep.worker=true" in call.overrides


def test_a_sweep_prints_its_whole_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "budget_decay_temperature", "--print-config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["data"]["eval_rows"] == 8
    assert shown["experiment"] == "demo"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["sweep", "smoke", "other"], "'other' is not key=value"),
        (["sweep", "smok"], "did you mean smoke"),
        (["sweep"], "kvpop sweep NAME"),
        (["sweep", "smoke", "--workers"], "unknown option --workers; did you mean --worker"),
        (["train", "--worker"], "unknown option --worker"),
        (["sweep", "smoke", "policy.decay=0.9"], "policy.decay is a key of the space"),
    ],
)
def test_mistakes(
    words: list[str],
    part: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert part in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_help_names_the_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--help"]) == 0
    assert "usage: kvpop sweep NAME [--worker] [--report] [key=value ...]" in capsys.readouterr().out
