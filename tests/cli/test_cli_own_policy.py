"""`policy.module=FILE.py`: a policy of one's own is compared like any other."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from kvpop_lightning.baselines import registry
from kvpop_lightning.cli import main
from kvpop_lightning.policy.scorers import build

PAGE = (Path(__file__).parents[2] / "docs" / "baselines.md").read_text()
WORDS = [
    "evaluate",
    "experiment=smoke",
    "tracking=none",
    "eval.rows=1",
    "eval.figures=false",
    "trainer.progress=false",
]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder; what a test registers is forgotten after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    monkeypatch.setattr(build, "_FACTORIES", dict(build._FACTORIES))
    for name in [name for name in sys.modules if name.startswith("kvpop_own_")]:
        monkeypatch.delitem(sys.modules, name)


def test_the_pages_example_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that docs/baselines.md gives, with the file that it shows."""
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    Path("value_norm.py").write_text(code.group(1))
    command = re.search(r"`kvpop evaluate (policy\.module=value_norm\.py policies=\S+)`", PAGE)
    assert command is not None
    assert main([*WORDS, *command.group(1).split()]) == 0
    table = {e["policy"]: e for e in json.loads(Path("runs/smoke/table.json").read_text())}
    assert set(table) == {"full", "streaming_llm", "value_norm"}
    assert table["value_norm"]["kl"] > 1e-4
    assert table["value_norm"]["kl"] != table["streaming_llm"]["kl"]
    assert "value_norm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "no such file"), ("import nonsense_xyz\n", "nonsense_xyz"), ("x = 1\n", "value_norm")],
)
def test_a_file_that_is_missing_broken_or_registers_nothing(
    text: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        Path("mine.py").write_text(text)
    assert main([*WORDS, "policy.module=mine.py", "policies=value_norm"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
