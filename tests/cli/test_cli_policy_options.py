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
    for options in (["prompt_length=16"], ["prompt_length=16", "decode=h2o"]):
        words = [f"policy.options.{option}" for option in options]
        assert main(["evaluate", *WORDS, "policy=snapkv", *words]) == 0
        table = json.loads(Path("runs/smoke/table.json").read_text())
        found.append(next(e for e in table if e["policy"] == "snapkv"))
    assert found[0]["kl"] != found[1]["kl"]
    for policy, option, said in (
        ("snapkv", "nonsense=1", "no option 'nonsense'; it takes prompt_length"),
        ("snapkv", "prompt_length=2.5", "policy.options of snapkv"),
        ("attention_ema", "averaging={a: 1}", "value of the wrong kind"),
        ("snapkv", "budget=7", "set policy.budget"),
        ("tova", "policy=h2o", "set policy"),
        ("random", "head_dim=7", "the model says it"),
    ):
        capsys.readouterr()
        assert main(["evaluate", *WORDS, f"policy={policy}", f"policy.options.{option}"]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error


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
    for word in ("policy=tova", "policy.name=tova"):
        other = compose([f"experiment={file}", word], command="evaluate")
        assert (other.policy.name, other.policy.options) == ("tova", {}), word
        assert "tova" in other.eval.policies
    same = compose([f"experiment={file}", "policy=snapkv", "policy.options.pool=1e0"])
    assert same.policy.options == {"observed": 8, "pool": 1.0}


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
