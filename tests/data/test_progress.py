"""How far a preparation is: an estimate that is there after the first block, on a terminal and in a log."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from kvpop_lightning.data import prepare as prepare_module
from kvpop_lightning.data import progress
from kvpop_lightning.data.prepare import load_rows, prepare


@pytest.fixture
def clock(monkeypatch):
    """A block takes 100 seconds: longer than what rich remembers by default."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_terminal_shows_an_estimate_after_the_first_slow_block(monkeypatch, clock):
    screen = StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120)
    terminal.get_time = lambda: clock[0]
    monkeypatch.setattr(progress, "Console", lambda stderr: terminal)
    with progress.bar("preparing", 10, 2, True) as advance:
        for _ in range(3):
            clock[0] += 100
            advance(2)
        clock[0] += 1
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert re.findall(r"8/10 0:05:0[01] left (\S+)", plain)[-1] == "0:01:40"  # two more at 50 seconds each


def test_a_log_gets_a_line_now_and_then_and_none_of_a_short_job(clock, caplog):
    caplog.set_level(logging.INFO, logger="kvpop_lightning")
    with progress.bar("preparing", 100, 10, True) as advance:
        advance(5)
        assert not caplog.messages
        clock[0] += 40
        advance(15, 50)  # 20 in 40 s, 20 to come
        clock[0] += 1
        advance(1)
    assert caplog.messages == ["preparing: 30 of 50 in 0:00:40, 0:00:40 left"]
    with progress.bar("preparing", None, 0, True) as advance:
        clock[0] += 60
        advance(7)
    assert caplog.messages[-1] == "preparing: 7 in 0:01:00"


def test_all_rows_of_a_file_are_expected_from_the_share_that_is_read(
    config, tokenizer, tmp_path, monkeypatch
):
    told = []

    class Shown:
        def __init__(self, title, total, done, show):
            told.append(total)

        def __enter__(self):
            return lambda more, total=None: told.append(total)

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(prepare_module, "bar", Shown)
    rows = [{"problem": f"Add {n} to 1.", "solution": f"{n} + 1 = {n + 1}. " * 12} for n in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    asked = replace(
        config, source="jsonl", path=str(tmp_path / "a.jsonl"), eval_share=0.0, train_rows=None, window=20
    )
    made = load_rows(prepare(asked, tokenizer, splits=("train",)), "train")
    assert made.index["account"]["kept"] == 100
    assert told[0] is None
    assert told[1:] == pytest.approx([len(made)] * (len(told) - 1), rel=0.2)
    assert len(told) == 1 + 5 + 1  # blocks of 20 documents, and the end
    told.clear()
    few = replace(asked, train_rows=3)
    assert len(load_rows(prepare(few, tokenizer, splits=("train",)), "train")) == 3
    assert set(told) == {3}
