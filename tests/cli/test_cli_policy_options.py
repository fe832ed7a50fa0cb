"""`policy.options.*`: what only one policy knows, from the command line to the rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kvpop_lightning.cli import main
from kvpop_lightning.config import compose
from kvpop_lightning.config.compose import to_yaml
from kvpop_lightning.config.policies import retrofit_options, with_policy

WORDS = ["experiment=smoke", "tracking=none", "eval.rows=1", "eval.figures=false", "trainer.progress=false"]


def test_an_option_reaches_the_rule_and_a_wrong_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for options in (["prompt_length=16"], ["prompt_length=16", "decode=h2o"], ["nonsense=1"]):
        words = [f"policy.options.{option}" for option in options]
        assert main(["evaluate", *WORDS, "policy=snapkv", *words]) == 0
        table = json.loads(Path("runs/smoke/table.json").read_text())
        found.append(next(e for e in table if e["policy"] == "snapkv"))
    assert found[0]["kl"] != found[1]["kl"]
    assert found[2]["kl"] is None
    assert "no option 'nonsense'; it takes prompt_length" in found[2]["reason"]
    capsys.readouterr()


def test_options_belong_to_the_policy_that_was_chosen() -> None:
    words = ["policy=snapkv", "policy.options.observed=8", "policy.options.decode=h2o"]
    config = compose(words)
    assert config.policy.options == {"observed": 8, "decode": "h2o"}
    assert retrofit_options(config)["observed"] == 8
    assert with_policy(config, "tova").policy.options == {}
    saved = yaml.safe_load(to_yaml(config))
    assert saved["policy"]["options"] == config.policy.options


def test_a_saved_configuration_keeps_them(tmp_path: Path) -> None:
    config = compose(["policy=snapkv", "policy.options.observed=8"])
    file = tmp_path / "saved.yaml"
    file.write_text(to_yaml(config))
    assert compose([f"experiment={file}"]).policy == config.policy


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["policy=retention_gate", "policy.gate.source=channel"], "only dms and dmc borrow a channel"),
        (['generate.stop=["END",""]'], "generate.stop"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *words]) == 2
    assert said in capsys.readouterr().err
