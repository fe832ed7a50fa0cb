"""Stepwise rules through evaluation and the command line, at equal bytes beside the others."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from kvpop_lightning.baselines import get
from kvpop_lightning.config.schema import (
    BudgetConfig,
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    PolicyConfig,
)
from kvpop_lightning.errors import UserError
from kvpop_lightning.evaluation.compare import train_all
from kvpop_lightning.evaluation.evaluate import evaluate
from kvpop_lightning.models import tiny_model, tiny_tokenizer
from kvpop_lightning.policy.scorers import build_scorer, scorer_types

T = 48
RULES = [
    kind
    for kind in scorer_types()
    if build_scorer(kind, num_heads=1, head_dim=2, hidden_size=2, window=1).stepwise and not get(kind).trained
]


def rows(count: int = 2) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(3, 272, (T,), generator=g),
            "position_ids": torch.arange(T),
            "document_ids": torch.zeros(T, dtype=torch.int64),
            "loss_mask": torch.ones(T, dtype=torch.bool),
            "row": torch.tensor(n),
        }
        for n in range(count)
    ]


@pytest.mark.parametrize("equal_bytes", [True, False])
def test_every_rule_is_in_the_table(tmp_path, equal_bytes: bool) -> None:
    # Expected Attention's state (16 + 16^2 numbers per query head) leaves nothing of so few tiny keys.
    affordable = [rule for rule in RULES if not equal_bytes or rule != "expected_attention"]
    config = Config(
        model=ModelConfig(source="tiny-llama"),
        data=DataConfig(row_length=T),
        policy=PolicyConfig(budget=BudgetConfig(sink=2, window=6, topk=12), equal_bytes=equal_bytes),
        eval=EvalConfig(
            policies=["full", "streaming_llm", *affordable],
            budgets=[20], reference_length=T, rows=2, figures=not equal_bytes,
        ),
        run_dir=str(tmp_path),
    )  # fmt: skip
    model = tiny_model("llama", kv_heads=2, group=3)
    data = SimpleNamespace(eval_rows=rows(), fingerprint="x")
    result = evaluate(config, model=model, tokenizer=tiny_tokenizer(), data=data, progress=False)
    table = {entry["policy"]: entry for entry in json.loads(result.table_path.read_text())}
    assert set(table) == set(config.eval.policies)
    for name in config.eval.policies[1:]:
        entry = table[name]
        if name == "snapkv":
            assert "prompt of 256 tokens whole, and eval.reference_length is 48" in entry["reason"]
            continue
        assert entry["kl"] > 1e-4
        assert entry["peak_bytes"] == entry["bytes_held"]
        if name in RULES:
            assert entry["boundary_accuracy"] is None, "no priorities, no decisions to compare"
        if equal_bytes:
            assert entry["bytes_accounted"] <= table["streaming_llm"]["bytes_accounted"]
        else:
            assert entry["sink"] + entry["window"] + entry["topk"] == 20
    distinct = {round(entry["kl"], 9) for entry in table.values() if entry["kl"] is not None}
    assert len(distinct) == len(table) - 1, "two rules gave the same result"


def test_a_policy_that_cannot_run_says_so(tmp_path) -> None:
    """Its cell has the reason, the others have their figures, Quest is marked as unbounded."""
    names = ["full", "expected_attention", "quest", "streaming_llm", "streaming_llm_rotated"]
    config = Config(
        model=ModelConfig(source="tiny-llama"),
        data=DataConfig(row_length=T),
        policy=PolicyConfig(budget=BudgetConfig(sink=2, window=6, topk=12)),
        eval=EvalConfig(policies=names, budgets=[20], reference_length=T, rows=2),
        run_dir=str(tmp_path),
    )
    data = SimpleNamespace(eval_rows=rows(), fingerprint="x")
    model = tiny_model("llama", kv_heads=2, group=3)
    result = evaluate(config, model=model, tokenizer=tiny_tokenizer(), data=data, progress=False)
    table = {entry["policy"]: entry for entry in json.loads(result.table_path.read_text())}
    assert list(table) == names
    refused, quest = table["expected_attention"], table["quest"]
    assert refused["kl"] is None
    assert "cannot pay" in refused["reason"]
    assert refused["rows"] == []
    assert quest["bounded"] is False
    assert quest["bytes_held"] > table["full"]["bytes_held"], "all keys and the bounds of the pages"
    assert 0 < quest["retained_mass"] < 1
    assert table["streaming_llm"]["kl"] != table["streaming_llm_rotated"]["kl"]
    page = result.markdown_path.read_text()
    assert "| expected_attention | cannot run |" in page
    assert "expected_attention at 20 keys: cannot run (" in page
    assert "quest*" in page
    assert all(path.is_file() for path in result.figures)
    again = evaluate(config, model=model, tokenizer=tiny_tokenizer(), data=data, progress=False)
    assert again.computed == 0
    assert again.table == result.table


def test_a_training_that_cannot_be_is_a_cell_with_its_reason(tmp_path) -> None:
    def train_one(name: str) -> None:
        if name != "kvpop_mlp":
            raise UserError(f"{name} is\nimpossible")

    def refuses(name: str) -> None:
        raise ValueError(f"{name} does not fit")

    refused = train_all(["dms", "kvpop_mlp"], lambda name: refuses(name) if name == "dms" else None)
    assert refused == {"dms": "not trained: dms does not fit"}
    refused = train_all(["dms", "kvpop_mlp", "dmc"], train_one)
    assert refused == {name: f"not trained: {name} is impossible" for name in ("dms", "dmc")}
    with pytest.raises(UserError, match="dms is"):
        train_all(["dms", "dmc"], train_one)
    config = Config(
        model=ModelConfig(source="tiny-llama"),
        data=DataConfig(row_length=T),
        policy=PolicyConfig(budget=BudgetConfig(sink=2, window=6, topk=12)),
        eval=EvalConfig(policies=["dms", "streaming_llm"], budgets=[20, 16], reference_length=T, rows=2,
        figures=False), run_dir=str(tmp_path),
    )  # fmt: skip
    data = SimpleNamespace(eval_rows=rows(), fingerprint="x")
    model = tiny_model("llama", kv_heads=2, group=3)
    result = evaluate(
        config, model=model, tokenizer=tiny_tokenizer(), data=data, progress=False, refused=refused
    )
    cells = {(e["policy"], e["budget"]): e for e in result.table}
    for budget in (20, 16):
        assert cells["dms", budget]["reason"] == refused["dms"]
        assert cells["streaming_llm", budget]["kl"] > 0
    assert "dms at 16 keys: cannot run (not trained: dms is impossible)" in result.markdown_path.read_text()
