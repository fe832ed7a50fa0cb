"""The rows that real processes are given: one, then two, then one again, stopped in the middle of epochs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reading_worker

pytestmark = pytest.mark.slow


def read(folder: Path, **asked: Any) -> list[list[int]]:
    """Rows of each step over all processes, in the order of the processes."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, reading_worker.__file__, str(folder), json.dumps(asked)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    parts = [json.loads((folder / f"rows-{rank}.json").read_text()) for rank in range(asked["processes"])]
    return [[row for part in step for row in part] for step in zip(*parts, strict=True)]


@pytest.mark.parametrize("streaming", [False, True])
def test_one_two_and_one_process_read_the_sequence_of_one(tmp_path: Path, streaming: bool) -> None:
    """Epochs of two steps of four rows; stops after steps 1 (mid-epoch) and 5 (mid-epoch), goes on to 7."""
    straight = read(tmp_path / "straight", steps=7, processes=1, workers=0, streaming=streaming, resume=None)
    assert [len(step) for step in straight] == [4] * 7
    epochs = [straight[0] + straight[1], straight[2] + straight[3]]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert epochs[0] != epochs[1]
    found, resume = [], None
    for number, (steps, processes, workers) in enumerate([(1, 1, 3), (5, 2, 1), (7, 1, 0)]):
        folder = tmp_path / f"{number}"
        found += read(
            folder, steps=steps, processes=processes, workers=workers, streaming=streaming, resume=resume
        )
        resume = str(folder / "last.ckpt")
        assert Path(resume).is_file()
    assert found == straight
    shutil.rmtree(tmp_path / "straight")
