"""Values that have the right type and still cannot be: all are found, each once, in one line that names
the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpop_lightning.config.bounds import BOUNDS
from kvpop_lightning.config.checks import problems_of, value_at
from kvpop_lightning.config.choices import (
    CHOICES,
    POLICIES,
    did_you_mean,
    nearest,
)
from kvpop_lightning.config.compose import compose
from kvpop_lightning.config.describe import groups, settings, top_groups
from kvpop_lightning.config.memory import mlstm_cost_in_keys
from kvpop_lightning.config.policies import policies_to_compare, policies_to_train, with_policy
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import ConfigError, UserError

MLSTM = "policy=kvpop_mlstm"


def problems(*words: str, command: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(list(words), command=command)
    return caught.value.problems


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["policy.budget.topk=0"], ["policy.budget.topk=0", "at least 1", "streaming_llm"]),
        (["policy.budget.topk=-5"], ["policy.budget.topk=-5"]),
        (["policy.budget.window=0"], ["policy.budget.window=0"]),
        (["policy.budget.sink=-1"], ["policy.budget.sink=-1"]),
        (["policy.budget.window=512"], ["eval.budgets", "policy.budget.window 512", "at least 517"]),
        (["eval.budgets=[128,36]"], ["36 is too small", "policy.budget.window 32"]),
        (["eval.budgets=[]"], ["eval.budgets=[]", "at least one"]),
        (["policy.decay=0"], ["policy.decay=0", "(0, 1]"]),
        (["policy.decay=1.01"], ["policy.decay=1.01", "(0, 1]"]),
        (["policy.decay=-0.5"], ["policy.decay"]),
        (["policy.decay=nan"], ["policy.decay=nan", "finite"]),
        (["trainer.scorer_lr=.inf"], ["trainer.scorer_lr", "finite"]),
        (["policy.decay_step=0"], ["policy.decay_step"]),
        (["policy.name=kvpop_mpl"], ["policy.name=kvpop_mpl", "kvpop_mlp"]),
        (
            ["policy.scorer.inputs=kvh"],
            ["policy.scorer.inputs=kvh", "did you mean kv", "known: auto, kv, hidden"],
        ),
        (["eval.policies=full,randm"], ["eval.policies=randm", "random"]),
        (["eval.policies=full,full"], ["full is listed twice"]),
        (["train_policies=random"], ["train_policies=random"]),
        (["policy.scorer.type=mlstm"], ["policy.name=kvpop_mlp", "policy=kvpop_mlstm"]),
        (["policy.scorer.delay=33"], ["policy.scorer.delay=33", "policy.budget.window 32"]),
        ([MLSTM, "policy.budget.topk=9"], ["policy.budget.topk=9", "9 keys", "equal_bytes"]),
        (["eval.budgets=[45]"], ["eval.budgets=45", "mlstm", "9 keys"]),
        (["distill.target.source=student"], ["trainer.base=frozen", "distill.target.source=teacher"]),
        (["distill.target.normalizer=sparse"], ["distill.target.normalizer=sparse", "trainer.base=full"]),
        (["distill.temperature=0"], ["distill.temperature"]),
        (["distill.query_fraction=1.5"], ["distill.query_fraction"]),
        (["trainer.base=lora"], ["trainer.base=lora"]),
        (["trainer.max_steps=0"], ["trainer.max_steps"]),
        (["trainer.scorer_lr=-1e-3"], ["trainer.scorer_lr"]),
        (["data.row_length=1"], ["data.row_length"]),
        (["data.row_length=99999999999"], ["data.row_length=99999999999", "[2, 16777216]"]),
        (["data.processes=5000"], ["data.processes=5000", "[1, 1024]"]),
        (["data.path=mine.jsonl"], ["data.path=mine.jsonl", "data.source=procedural", "data=jsonl"]),
        (["data.train_rows=-4"], ["data.train_rows"]),
        (["data.min_document_tokens=9000"], ["data.min_document_tokens", "data.max_document_tokens"]),
        (["data.source=jsonl"], ["data.path", "data.source=jsonl"]),
        (["eval.rows=9"], ["eval.rows=9", "data.eval_rows 4"]),
        (["model.source=hub"], ["model.path", "hub id"]),
        (["model.source=path"], ["model.path", "folder"]),
        (["tracking.uri=./mlruns"], ["tracking.uri", "sqlite:///"]),
        (["tracking.uri=file:///tmp/x"], ["tracking.uri", "sqlite:///tmp/x.db"]),
        (["generate.top_p=0"], ["generate.top_p"]),
        (["seed=-1"], ["seed=-1"]),
    ],
)
def test_each_impossible_value_is_found_once(words: list[str], parts: list[str]) -> None:
    [problem] = problems(*words)
    assert "\n" not in problem
    for part in parts:
        assert part in problem


def test_all_are_reported_together() -> None:
    found = problems("policy.budget.topk=0", "policy.decay=2", "trainer.base=lora", "seed=-1", "eval.rows=99")
    assert len(found) == 5


def test_budgets_that_just_fit() -> None:
    compose(["eval.budgets=[46]"])  # 10 long-range keys, of which the mlstm state takes 9
    compose(["eval.budgets=[45]", "policy.equal_bytes=false"])
    compose(["eval.budgets=[37]", "eval.policies=full,kvpop_mlp"])
    compose([MLSTM, "policy.budget.topk=10"])
    compose(["policy.decay=1"])
    compose(["policy.scorer.delay=32"])
    compose(["policy.budget.topk=100000"])  # larger than any row: everything stays


def test_commands_that_never_evaluate_do_not_check_its_budgets() -> None:
    compose(["policy.budget.window=512", "prompt=a"], command="generate")
    assert problems("policy.budget.window=512", command="train")


def test_mlstm_cost_follows_the_head_size(tmp_path: Path) -> None:
    config = compose([])
    assert mlstm_cost_in_keys(config) == 9  # ceil(4 (16 * 32 + 17) / (4 * 64))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 256, "num_attention_heads": 2}))
    assert mlstm_cost_in_keys(compose(["model.source=path", f"model.path={tmp_path}"])) == 5
    (tmp_path / "config.json").write_text(
        json.dumps({"head_dim": 32, "hidden_size": 9, "num_attention_heads": 2})
    )
    assert mlstm_cost_in_keys(compose(["model.source=path", f"model.path={tmp_path}"])) == 17
    (tmp_path / "config.json").write_text("nonsense")
    assert mlstm_cost_in_keys(compose(["model.source=path", f"model.path={tmp_path}"])) is None
    assert mlstm_cost_in_keys(compose(["model=qwen3_4b"])) is None


def test_tables_name_real_keys() -> None:
    """A renamed key must not silently lose its check."""
    assert set(BOUNDS) <= set(settings())
    assert set(CHOICES) <= set(settings())
    numbers = {
        key
        for key, setting in settings().items()
        if setting.type in (int, float) and not isinstance(setting.default, bool)
    }
    assert numbers - set(BOUNDS) == {"distill.regression_offset"}  # any number will do


def test_policy_names_are_those_of_the_registry() -> None:
    registry = pytest.importorskip("kvpop_lightning.baselines.registry", exc_type=ImportError)
    assert set(POLICIES) == set(registry.available())


def test_default_configuration_is_sound() -> None:
    assert problems_of(Config()) == []
    assert value_at(Config(), "policy.budget.topk") == Config().policy.budget.topk


def test_schema_walk() -> None:
    assert settings()["policy.scorer.delay"].expected == "int or null"
    assert settings()["eval.budgets"].expected == "list of int"
    assert "gamma" in settings()["policy.decay"].doc
    assert groups()["policy.budget"] == ("sink", "window", "topk")
    assert "policy" in top_groups()
    assert "seed" not in top_groups()


def test_nearest_names() -> None:
    assert nearest("topk", settings())[0] == "policy.budget.topk"
    assert nearest("qqqq", settings()) == []
    assert did_you_mean("qqqq", ["a", "b"]) == "; known: a, b"
    assert did_you_mean("qqqq", settings()) == ""


def test_with_policy_changes_name_and_scorer_only() -> None:
    config = compose(["experiment=demo"])
    other = with_policy(config, "kvpop_mlstm")
    assert (other.policy.name, other.policy.scorer.type) == ("kvpop_mlstm", "mlstm")
    assert other.policy.budget == config.policy.budget
    assert with_policy(other, "kvpop_mlp") == config
    assert with_policy(config, "random+decay").policy.name == "random+decay"
    with pytest.raises(UserError, match="kvpop_mlp"):
        with_policy(config, "kvpop_mpl")


def test_what_is_trained() -> None:
    assert policies_to_train(compose([])) == ["kvpop_mlp"]
    assert policies_to_train(compose(["experiment=demo"])) == ["kvpop_mlp", "kvpop_mlstm"]
    with pytest.raises(UserError, match="nothing to train"):
        policies_to_train(compose(["policy=random"]))
    assert policies_to_compare(compose(["eval.policies=full,kvpop_mlp"])) == ["kvpop_mlp"]
    assert policies_to_compare(compose(["eval.policies=full,random"])) == []
