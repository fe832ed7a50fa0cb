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


def forget_modules() -> None:
    """As another process would start."""
    for name in [name for name in sys.modules if name.startswith("kvpop_own_")]:
        del sys.modules[name]
    registry._SPECS.pop("value_norm", None)
    build._FACTORIES.pop("value_norm", None)


def test_a_changed_rule_is_measured_anew(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    found = []
    changed = code.group(1).replace("return value", "return -value")
    assert changed != code.group(1)
    for text in (code.group(1), changed, code.group(1)):
        Path("value_norm.py").write_text(text)
        forget_modules()
        assert main([*WORDS, "policy.module=value_norm.py", "policy=value_norm"]) == 0
        table = {e["policy"]: e for e in json.loads(Path("runs/smoke/table.json").read_text())}
        assert set(table) == {"full", "value_norm"}, "policy=NAME chooses what is measured"
        found.append(table["value_norm"]["kl"])
    assert found[0] != found[1]
    assert found[0] == found[2]


FACTORY = """
from kvpop_lightning.baselines import PolicySpec, register
from kvpop_lightning.policy.scorers import build_scorer, register_scorer

SIGN = 1.0


def make(num_heads, head_dim, hidden_size, sign=1.0):
    scorer = build_scorer("key_norm", num_heads=num_heads, head_dim=head_dim, hidden_size=hidden_size)
    given = scorer.score_rows
    scorer.score_rows = lambda *inputs: SIGN * sign * given(*inputs)
    return scorer


register_scorer("value_norm", make, ("sign",))
register(PolicySpec("value_norm", "value_norm", "a class of the package, changed by a file"))
"""


def test_options_files_and_folders_tell_results_apart() -> None:
    found = []
    for folder, text, options in (
        ("a", FACTORY, []), ("a", FACTORY, ["policy.options.sign=-1.0"]),
        ("a", FACTORY.replace("SIGN = 1.0", "SIGN = -1.0"), []), ("b", FACTORY, []),
    ):  # fmt: skip
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "mine.py").write_text(text)
        if folder == "a":  # the last one is another file in the same process
            forget_modules()
        else:
            registry._SPECS.pop("value_norm")
        words = [f"policy.module={folder}/mine.py", "policy=value_norm", *options]
        assert main([*WORDS, *words]) == 0
        table = {e["policy"]: e for e in json.loads(Path("runs/smoke/table.json").read_text())}
        found.append(table["value_norm"]["kl"])
    assert found[0] == found[3]
    assert found[1] == found[2]
    assert found[0] != found[1]


def test_policy_chooses_ones_own_in_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    Path("value_norm.py").write_text(code.group(1))
    words = ["experiment=smoke", "policy=value_norm", "max_new_tokens=3", "prompt=hi"]
    assert main(["generate", *words, "policy.module=value_norm.py"]) == 0
    capsys.readouterr()
    assert main(["generate", *words]) == 2
    assert "policy.module=FILE.py" in capsys.readouterr().err


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
