"""A whole evaluation on a tiny model: contents, equal bytes, resuming, files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvpop_lightning import BoundedCache, Budget, retrofit
from kvpop_lightning.config.schema import (
    BudgetConfig,
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    PolicyConfig,
)
from kvpop_lightning.errors import UserError
from kvpop_lightning.evaluation import evaluate as evaluate_module
from kvpop_lightning.evaluation.contestants import build_contestants
from kvpop_lightning.evaluation.evaluate import evaluate
from kvpop_lightning.evaluation.table import find, policies_of
from kvpop_lightning.models import is_retrofitted, load_model, unretrofit

T, ROWS = 96, 2
BUDGETS = [40, 24]
RULES = ["full", "streaming_llm", "random", "random+decay", "key_norm", "key_norm+decay", "oracle"]
TRAINED = ["kvpop_mlp", "kvpop_mlstm"]


def make_rows(count=ROWS, length=T, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(3, 272, (length,), generator=generator),
            "position_ids": torch.arange(length),
            "document_ids": torch.zeros(length, dtype=torch.int64),
            "loss_mask": torch.ones(length, dtype=torch.bool),
            "row": torch.tensor(n),
        }
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def base():
    return load_model(ModelConfig(source="tiny-llama"))


@pytest.fixture
def config(tmp_path, base):
    """A run folder with two saved policies."""
    config = Config(
        model=ModelConfig(source="tiny-llama"),
        data=DataConfig(row_length=T),
        policy=PolicyConfig(budget=BudgetConfig(sink=2, window=8, topk=14)),
        eval=EvalConfig(
            policies=[*RULES, *TRAINED], budgets=BUDGETS, reference_length=T, rows=ROWS, figures=False
        ),
        run_dir=str(tmp_path / "run"),
    )
    model, _ = base
    for name in TRAINED:
        retrofit(model, Budget(2, 8, 14), policy=name, memory_dim=4, value_dim=4, match_bytes=True, seed=1)
        model.save_pretrained(tmp_path / "run" / "policy" / name)
        unretrofit(model)
    return config


def run(config, base, policies=None, rows=None, fingerprint="data-1"):
    model, tokenizer = base
    data = SimpleNamespace(eval_rows=make_rows() if rows is None else rows, fingerprint=fingerprint)
    return evaluate(config, policies, model=model, tokenizer=tokenizer, data=data, progress=False)


def test_the_table_has_every_policy_at_every_budget(config, base):
    result = run(config, base)
    table = json.loads(result.table_path.read_text())
    assert table == result.table
    pairs = [(e["policy"], e["budget"]) for e in table]
    expected = [("full", T)] + [(p, b) for p in [*RULES[1:], *TRAINED] for b in BUDGETS]
    assert sorted(pairs) == sorted(expected)
    for e in table:
        assert e["compression"] == 1 - e["budget"] / T
        assert {"kl", "top1", "perplexity", "bytes_held"} <= e.keys()
        assert [r["row"] for r in e["rows"]] == list(range(ROWS))
        assert e["kl"] == pytest.approx(sum(r["kl"] for r in e["rows"]) / ROWS)
        assert e["perplexity"] == pytest.approx(math.exp(sum(r["nll"] for r in e["rows"]) / ROWS))
        assert all(math.isfinite(e[k]) for k in ("kl", "top1", "perplexity", "retained_mass"))
        assert e["rows"][0]["positions"] == T - 1 - T // 4
        if e["policy"] == "full":
            assert (e["kl"], e["top1"], e["retained_mass"]) == (0.0, 1.0, 1.0)
            continue
        assert e["kl"] > 1e-4
        assert 0 < e["retained_mass"] < 1
        assert 0 <= e["boundary_balanced_accuracy"] <= 1
        assert len(e["retained_mass_by_head"]) == 2
        assert len(e["retained_mass_by_head"][0]) == 6
        others = {p for p in TRAINED if p != e["policy"]}
        assert set(e["versus"]) == others
        for other in others:
            interval = e["versus"][other]["kl"]
            assert interval["difference"] == pytest.approx(e["kl"] - find(table, other, e["budget"])["kl"])
            assert interval["low"] <= interval["difference"] <= interval["high"]
    constant = find(table, "streaming_llm", 24)
    assert constant["rank_correlation"] is None
    assert find(table, "oracle", 24)["rank_correlation"] == pytest.approx(1.0)
    assert find(table, "random+decay", 24)["decay"] == pytest.approx(config.policy.decay)
    assert find(table, "random", 24)["decay"] == 1.0
    assert find(table, "random", 24)["kl"] != find(table, "random+decay", 24)["kl"]


def test_bytes_are_measured_and_equal(config, base):
    table = run(config, base).table
    model, _ = base
    for budget in BUDGETS:
        at = {e["policy"]: e for e in table if e["budget"] == budget}
        held = {e["bytes_held"] for p, e in at.items() if p != "kvpop_mlstm"}
        accounted = at["streaming_llm"]["bytes_accounted"]
        assert len(held) == 1
        assert at["kvpop_mlstm"]["topk"] < at["kvpop_mlp"]["topk"] == budget - 10
        slot = 2 * 2 * (2 * 16 * 2 + 12)  # layers, KV heads, one slot's bytes
        assert accounted - slot < at["kvpop_mlstm"]["bytes_accounted"] <= accounted
        # really allocated: the cache of a long text holds just as much
        retrofit(model, Budget(2, 8, budget - 10), policy="random")
        cache = BoundedCache(model, record=False)
        with torch.no_grad():
            model(torch.randint(3, 272, (1, 90)), past_key_values=cache, use_cache=True)
        assert held == {cache.bytes_held()}
        assert model.kvpop.bytes_per_sequence(element_bytes=4) == cache.bytes_held()
        unretrofit(model)
    full = find(table, "full", T)
    assert full["bytes_held"] == 2 * 2 * T * 2 * 16 * 4
    assert full["bytes_accounted"] * 2 == full["bytes_held"]


def test_a_second_run_computes_nothing_and_changes_nothing(config, base, monkeypatch):
    first = run(config, base)
    assert first.computed > 0
    monkeypatch.setattr(evaluate_module, "dense_row", lambda *a, **k: pytest.fail("a forward was repeated"))
    monkeypatch.setattr(evaluate_module, "measured_bytes", lambda *a, **k: pytest.fail("measured again"))
    second = run(config, base)
    assert second.computed == 0
    assert second.table == first.table


def test_an_interrupted_run_goes_on_where_it_stopped(config, base, monkeypatch):
    whole = run(config, base).table
    config = replace(config, run_dir=str(config.run_dir) + "/again")
    rules = [p for p in RULES if p != "full"]
    real, calls = evaluate_module.policy_record, []

    def stop_at_ten(*args, **kwargs):
        if len(calls) == 10:
            raise KeyboardInterrupt
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(evaluate_module, "policy_record", stop_at_ten)
    with pytest.raises(KeyboardInterrupt):
        run(config, base, rules)
    model, _ = base
    assert not is_retrofitted(model)  # left as it was found
    calls.clear()
    monkeypatch.setattr(evaluate_module, "policy_record", lambda *a, **k: calls.append(1) or real(*a, **k))
    resumed = run(config, base, rules)
    assert len(calls) == len(rules) * len(BUDGETS) * ROWS - 10
    for e in resumed.table:
        assert e["kl"] == pytest.approx(find(whole, e["policy"], e["budget"])["kl"], rel=1e-6)


def test_what_changes_a_value_is_not_reused(config, base):
    policies = ["random+decay", "kvpop_mlp"]
    assert run(config, base, policies).computed == 2 * 2 * (ROWS + 1)
    assert run(config, base, policies, fingerprint="data-2").computed == 2 * 2 * (ROWS + 1)
    other_seed = replace(config, seed=7)
    assert run(other_seed, base, policies).computed == 2 * (ROWS + 1)  # random alone depends on it
    other_decay = replace(config, policy=replace(config.policy, decay=0.5))
    assert run(other_decay, base, policies).computed == 2 * (ROWS + 1)  # the trained one brings its own
    model, _ = base
    retrofit(model, Budget(2, 8, 14), policy="kvpop_mlp", seed=99)
    model.save_pretrained(config.run_dir + "/policy/kvpop_mlp")
    unretrofit(model)
    assert run(config, base, policies).computed == 2 * (ROWS + 1)  # new scorer weights
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-3
    try:
        assert run(config, base, ["random"]).computed == 2 * (ROWS + 1)
        assert run(config, base, ["random"]).computed == 0
    finally:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] -= 1e-3


def test_a_damaged_record_is_computed_again(config, base):
    first = run(config, base, ["random"])
    files = sorted((evaluate_module.Path(config.run_dir) / "eval_cache").glob("random-b24-row1-*.json"))
    files[0].write_text(files[0].read_text()[:40])
    again = run(config, base, ["random"])
    assert again.computed == 1
    assert again.table == first.table


def test_full_alone_needs_no_figures(config, base):
    config = replace(config, eval=replace(config.eval, figures=True, rows=1))
    result = run(config, base, ["full"])
    assert policies_of(result.table) == ["full"]
    assert result.figures == []


def test_figures_are_saved_as_artifacts(config, base):
    config = replace(config, eval=replace(config.eval, figures=True, rows=1))
    result = run(config, base)
    assert [p.name for p in result.figures] == [
        "kl_vs_budget.png",
        "retained_mass.png",
        "paired_differences.png",
        "eviction_pattern.png",
    ]
    assert all(p.stat().st_size > 5000 for p in result.artifacts if p.suffix == ".png")
    assert result.table_path in result.artifacts


def test_the_models_own_policy_comes_back(config, base):
    model, _ = base
    retrofit(model, Budget(2, 8, 30), policy="key_norm")
    own = model.kvpop
    run(config, base, ["streaming_llm", "oracle", "kvpop_mlp"])
    assert model.kvpop is own
    unretrofit(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ["random", "kvpop_linear"]}, "kvpop_linear is not trained yet.*kvpop train"),
        ({"policies": ["randm"]}, "eval.policies.*randm.*did you mean random"),
        ({"budgets": [10]}, "eval.budgets: 10 keys.*use 11 or more"),
    ],
)
def test_mistakes_get_one_clear_line(config, base, change, message):
    config = replace(config, eval=replace(config.eval, **change))
    with pytest.raises(UserError, match=message) as error:
        run(config, base)
    assert "\n" not in str(error.value)


def test_another_window_than_trained_is_refused(config, base):
    config = replace(config, policy=replace(config.policy, budget=BudgetConfig(sink=2, window=6, topk=16)))
    with pytest.raises(UserError, match="trained with a window of 8 tokens"):
        run(config, base, ["kvpop_mlp"])


def test_no_rows_is_refused(config, base):
    with pytest.raises(UserError, match="no held-out row"):
        run(config, base, ["random"], rows=[])


def test_one_training_serves_all_budgets(config, base):
    """The scorers are shared, the budget differs, and the saved policy's own budget plays no part."""
    model, _ = base
    retrofit(model, Budget(2, 8, 14), policy="streaming_llm")
    found = build_contestants(model, config, TRAINED)
    unretrofit(model)
    assert [(c.name, c.total) for c in found] == [(n, b) for n in TRAINED for b in BUDGETS]
    first, second = (c.policy for c in found[:2])
    assert first.scorers[0] is second.scorers[0]
    assert (first.budget, second.budget) == (Budget(2, 8, 30), Budget(2, 8, 14))
    assert found[0].key != found[1].key


def test_a_base_trained_with_its_policy_runs_on_its_own_weights(config, base):
    student, _ = load_model(ModelConfig(source="tiny-llama"))
    retrofit(student, Budget(2, 8, 14), policy="kvpop_mlp", seed=1)
    with torch.no_grad():
        student.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    student.save_pretrained(config.run_dir + "/policy/kvpop_mlp")
    before = find(run(config, base, ["full", "kvpop_mlp"]).table, "full", T)
    wide = replace(config, eval=replace(config.eval, budgets=[T + 10]))
    result = run(wide, base, ["full", "kvpop_mlp"])
    assert find(result.table, "full", T)["nll"] == before["nll"]  # the teacher is the untouched base
    assert find(result.table, "kvpop_mlp", T + 10)["kl"] > 1e-3  # nothing evicted: the weights differ


def test_the_decay_follows_the_budget_for_learned_policies_and_controls_alike(config, base):
    """Half the slots: the same age costs twice as much; policies without decay keep none."""
    model, _ = base
    retrofit(model, Budget(2, 8, 14), policy="streaming_llm")
    names = ["kvpop_mlp", "random+decay", "random"]
    given = config.policy.budget
    trained = given.sink + given.window + given.topk

    def decays(by_budget):
        changed = replace(config, eval=replace(config.eval, decay_by_budget=by_budget))
        return {c.pair: float(c.policy.decay.flatten()[0]) for c in build_contestants(model, changed, names)}

    fixed, scaled = decays(False), decays(True)
    unretrofit(model)
    for budget in BUDGETS:
        for name in ("kvpop_mlp", "random+decay"):
            assert fixed[name, budget] == fixed[name, BUDGETS[0]] < 1
            assert scaled[name, budget] == pytest.approx(fixed[name, budget] ** (trained / budget), rel=1e-12)
        assert scaled["random", budget] == 1.0
    assert scaled["kvpop_mlp", BUDGETS[0]] != scaled["kvpop_mlp", BUDGETS[1]]
