"""Two processes give the training of one: means are counted over all of them, and all stop together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ddp_worker
import pytest
import torch

pytestmark = pytest.mark.slow


def two_processes(kind: str, folder: Path, *extra: str) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, ddp_worker.__file__, kind, str(folder), *extra],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "result-2.pt", weights_only=True)


@pytest.mark.parametrize("kind", ["scorers", "full"])
def test_two_processes_train_as_one_does(kind: str, tmp_path: Path) -> None:
    ddp_worker.train(kind, tmp_path, processes=1)
    one = torch.load(tmp_path / "result-1.pt", weights_only=True)
    two = two_processes(kind, tmp_path)
    assert len(one["metrics"]) == len(two["metrics"]) == ddp_worker.STEPS
    for a, b in zip(one["metrics"], two["metrics"], strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if name not in ("train/rank_correlation", "train/target_maximum"):  # means of micro-batches
                assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-3, atol=1e-5, msg=name)


def test_a_signal_to_one_process_stops_both_and_the_training_goes_on(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    expected = two_processes("scorers", whole)
    stopped = two_processes("scorers", broken, "2")
    assert stopped["stopped"] > 0
    assert len(stopped["metrics"]) == 2
    resumed = two_processes("scorers", broken)
    assert len(resumed["metrics"]) == ddp_worker.STEPS - 2
    assert all(torch.equal(w, expected["weights"][n]) for n, w in resumed["weights"].items())
