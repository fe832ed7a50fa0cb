"""The feature cache: what it stores, when it computes again, limits, interruption, and what half precision
costs.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import BUDGET, HEAD_DIM, KV_HEADS, LAYERS, Rows

from kvpop_lightning.config.schema import DistillConfig, TrainerConfig
from kvpop_lightning.errors import UserError
from kvpop_lightning.models import dense, observe
from kvpop_lightning.policy import future_attention_target
from kvpop_lightning.training import feature_store
from kvpop_lightning.training import features as features_module
from kvpop_lightning.training.feature_store import FeatureStore
from kvpop_lightning.training.features import FeatureCache, FeatureRequest, dense_features
from kvpop_lightning.training.forward import collate
from kvpop_lightning.training.retention_loss import RetentionLoss
from kvpop_lightning.training.scorers import FeatureRows, ScorerModule
from kvpop_lightning.training.standardization import standardize_scorers


def fill(
    model: Any, folder: Path, count: int = 4, data: str = "data", **request: Any
) -> tuple[FeatureCache, int]:
    options = {"window": BUDGET.window, **request}
    cache = FeatureCache(folder, model, data, FeatureRequest(**options))
    return cache, cache.fill(Rows(), range(count), progress=False)


def test_features_are_the_dense_forwards_own(make_model: Any, rows: Rows) -> None:
    model = make_model()
    batch = collate([rows[1], rows[2]])
    found = dense_features(model, batch, FeatureRequest(BUDGET.window, "mean", hidden=True))
    layers: list[Any] = []
    with torch.no_grad(), dense(model), observe(model, layers.append):
        model(batch["input_ids"], position_ids=batch["position_ids"], document_ids=batch["document_ids"])
    assert found["key"].shape == (2, LAYERS, KV_HEADS, 48, HEAD_DIM)
    for index, seen in enumerate(layers):
        target, valid = future_attention_target(
            seen.query, seen.key, window=BUDGET.window, document_ids=batch["document_ids"], aggregation="mean"
        )
        for name, wanted in (
            ("key", seen.key),
            ("value", seen.value),
            ("hidden", seen.hidden),
            ("target", target),
        ):
            torch.testing.assert_close(found[name][:, index], wanted, msg=name)
        assert torch.equal(found["valid"][:, index], valid)
    assert not found["valid"][batch["document_ids"][:, None, None].expand_as(found["valid"]) < 0].any()


def test_a_row_is_computed_once_and_only_what_changed_again(make_model: Any, tmp_path: Path) -> None:
    model = make_model()
    assert fill(model, tmp_path)[1] == 4
    assert fill(model, tmp_path)[1] == 0
    assert fill(make_model("kvpop_mlstm"), tmp_path)[1] == 0, "the policy is no part of the features"
    keys = sorted(tmp_path.rglob("kv/*"))
    stamps = [p.stat().st_mtime_ns for p in keys]
    assert fill(model, tmp_path, window=9)[1] == 4
    assert fill(model, tmp_path, aggregation="mean")[1] == 4
    assert fill(model, tmp_path, hidden=True)[1] == 4
    assert [p.stat().st_mtime_ns for p in keys] == stamps, "another target must not rewrite keys and values"
    assert fill(model, tmp_path, data="other")[1] == 4
    with torch.no_grad():
        next(model.parameters())[3, 3] += 1e-3
    assert fill(model, tmp_path)[1] == 4, "another base has other features"


def test_interrupted_filling_goes_on_and_leaves_no_broken_row(
    make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    whole, _ = fill(model, tmp_path / "whole")
    calls = 0
    original = features_module.dense_features

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(features_module, "dense_features", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill(model, tmp_path / "broken")
    cache, fresh = fill(model, tmp_path / "broken")
    assert fresh == 2
    for row in range(4):
        for name, tensor in whole.get(row).items():
            assert torch.equal(tensor, cache.get(row)[name])
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")], "temporary files were left"


def test_a_crash_while_writing_leaves_the_row_missing(
    make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvpop_lightning.training.feature_store as store_module

    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "save_file", full)
    with pytest.raises(UserError, match=r"no space left.*trainer\.feature_cache_dir"):
        fill(make_model(), tmp_path)
    monkeypatch.undo()
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.parent.name != "claims"]
    assert fill(make_model(), tmp_path)[1] == 4


def test_the_size_is_printed_before_filling_close_to_what_is_written(
    make_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for hidden in (False, True):
        cache = FeatureCache(
            tmp_path / str(hidden), make_model(), "d", FeatureRequest(4, hidden=hidden, topk=5)
        )
        cache.fill(Rows(), range(4))
        out = capsys.readouterr()
        assert "features of 4 rows" in out.out
        assert "4/4" in out.err
        written = sum(p.stat().st_size for p in (tmp_path / str(hidden)).rglob("*") if p.is_file())
        headers = 4 * 5 * 500  # a header per file counts for tiny rows only
        assert 0 <= written - 4 * cache.row_bytes(48) < headers


def test_too_large_for_the_limit_is_one_clear_line(make_model: Any, tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, make_model(), "data", FeatureRequest(4), limit_gb=1e-5)
    with pytest.raises(UserError, match=r"trainer\.feature_cache_limit_gb=1e-05"):
        cache.fill(Rows(), range(4), progress=False)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_is_there_already_does_not_count_against_the_limit(
    make_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model()
    FeatureCache(tmp_path, model, "data", FeatureRequest(4)).fill(Rows(), range(4), progress=False)
    held = feature_store.folder_bytes(tmp_path)
    other = FeatureRequest(4, "mean")  # only its targets are new
    targets = 4 * 48 * LAYERS * KV_HEADS * 5
    tight = FeatureCache(tmp_path, model, "data", other, limit_gb=(held + targets - 1) / 1e9)
    with pytest.raises(UserError, match="feature_cache_limit_gb"):
        tight.fill(Rows(), range(4), progress=False)
    fits = FeatureCache(tmp_path, model, "data", other, limit_gb=(held + targets + 1) / 1e9)
    capsys.readouterr()
    assert fits.fill(Rows(), range(4)) == 4
    assert f"features of 4 rows: {targets / 1e6:.0f} MB to add" in capsys.readouterr().out


def test_processes_that_fill_the_same_rows_share_the_work(
    make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = FeatureCache(tmp_path, make_model(), "data", FeatureRequest(4))
    first_done = threading.Event()
    real = features_module.dense_features

    def compute(*arguments: Any) -> Any:
        first_done.set()
        return real(*arguments)

    monkeypatch.setattr(features_module, "dense_features", compute)
    counts: list[int] = []
    # As if another process had rows 0 and 1 in work: file locks of two open files exclude each other.
    with cache.store.claim([0, 1]) as claimed:
        assert claimed == [0, 1]
        with cache.store.claim([1, 2]) as others:
            assert others == [2]
        thread = threading.Thread(
            target=lambda: counts.append(cache.fill(Rows(), range(4), progress=False)), daemon=True
        )
        thread.start()
        assert first_done.wait(30)
        while not all(row in cache for row in (2, 3)):
            time.sleep(0.01)
        assert 0 not in cache
        assert thread.is_alive(), "it waits for the rows of the other"
        cache.put([0], real(*batch_of(cache, 0)))
    thread.join(30)
    assert counts == [3], "row 0 came from the other, row 1 was left behind and is computed here"
    assert all(row in cache for row in range(4))


def batch_of(cache: FeatureCache, row: int) -> tuple[Any, Any, FeatureRequest]:
    (model,) = cache._model
    return model, collate([Rows()[row]]), cache.request


def test_values_beyond_half_precision_are_stored_in_full(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path)
    store.write(
        0, "kv", {"key": store.compress(torch.tensor([1e5, 1.0])), "value": store.compress(torch.ones(2))}
    )
    read = store.read(0, "kv")
    assert read["key"].dtype == torch.float32
    assert read["value"].dtype == torch.float16
    assert read["key"].tolist() == [1e5, 1.0]


@pytest.mark.parametrize("policy", ["kvpop_mlp", "kvpop_mlstm"])
def test_half_precision_storage_changes_scores_by_less_than_a_hundredth_of_a_nat(
    make_model: Any, tmp_path: Path, policy: str
) -> None:
    model = make_model(policy)
    scores = []
    for dtype in (torch.float16, torch.float32):
        cache = FeatureCache(tmp_path, model, "data", FeatureRequest(BUDGET.window), dtype=dtype)
        cache.fill(Rows(), range(4), progress=False)
        standardize_scorers(model.kvpop, (cache.get(i) for i in range(4)))
        module = ScorerModule(model.kvpop, DistillConfig(), TrainerConfig())
        scores.append(module.scores(collate([FeatureRows(cache, range(4))[i] for i in range(4)])))
    assert float((scores[0] - scores[1]).detach().abs().max()) < 1e-2 * float(scores[1].detach().std())


def test_statistics_are_those_of_the_first_real_tokens(make_model: Any, rows: Rows) -> None:
    model = make_model(inputs="kv_hidden")
    request = FeatureRequest(BUDGET.window, hidden=True, target=False)
    found = [dense_features(model, collate([rows[i]]), request) for i in range(4)]
    one_by_one = [{n: t[0] for n, t in f.items()} for f in found]
    used = standardize_scorers(model.kvpop, iter(one_by_one), tokens=120)
    assert used == 120
    real = [f["document_ids"] >= 0 for f in one_by_one]
    left, kept = 120, []
    for mask in real:
        take = mask & (mask.long().cumsum(0) <= left)
        kept.append(take)
        left -= int(take.sum())
    for layer, scorer in enumerate(model.kvpop.scorers):
        projection = scorer.projection
        for name in ("key", "value", "hidden"):
            x = torch.cat(
                [f[name][layer][..., take, :] for f, take in zip(one_by_one, kept, strict=True)], -2
            ).double()
            mean, std = x.mean(-2), x.std(-2, correction=0)
            torch.testing.assert_close(
                getattr(projection, f"{name}_mean").double().view_as(mean), mean, atol=1e-5, rtol=1e-4
            )
            torch.testing.assert_close(
                getattr(projection, f"{name}_std").double().view_as(std), std, atol=1e-5, rtol=1e-4
            )


def test_counts_known_beforehand_are_those_of_the_decisions(make_model: Any, rows: Rows) -> None:
    model = make_model()
    batch = collate([rows[i] for i in range(6)])
    found = dense_features(model, batch, FeatureRequest(BUDGET.window))
    for boundary in ("cutoff", "displaced"):
        loss = RetentionLoss(DistillConfig(boundary=boundary), model.kvpop.budget, model.kvpop.decay_step)
        ids = batch["document_ids"]
        decisions = loss.decide(found["target"][:, 1], found["valid"][:, 1], model.kvpop.decay[1], ids)
        counts = loss.counts(ids, loss.query_mask(ids, batch["row"], 0))
        assert counts.decisions > 0
        assert (decisions.valid.sum((0, 2)) == counts.decisions).all()
        sinks = batch["position_ids"] < BUDGET.sink
        assert ((found["valid"][:, 1] & ~sinks[:, None]).sum((0, 2)) == counts.tokens).all()


def test_drawn_queries_depend_on_seed_step_and_row_only(make_model: Any, rows: Rows) -> None:
    model = make_model()
    loss = RetentionLoss(
        DistillConfig(query_fraction=0.3), model.kvpop.budget, model.kvpop.decay_step, seed=4
    )
    batch = collate([rows[i] for i in range(4)])
    ids, numbers = batch["document_ids"], batch["row"]
    together = loss.query_mask(ids, numbers, 3)
    alone = torch.cat([loss.query_mask(ids[i : i + 1], numbers[i : i + 1], 3) for i in (2, 0)])
    assert torch.equal(together[[2, 0]], alone)
    assert not torch.equal(together, loss.query_mask(ids, numbers, 4))
    whole = loss.all_queries(ids)
    assert not (together & ~whole).any()
    assert 0 < int(together.sum()) < int(whole.sum())
