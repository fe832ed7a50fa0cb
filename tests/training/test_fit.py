"""`train`: from configuration to saved policy, reuse, resume, fast_dev_run, messages."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import BUDGET, Rows

from kvpop_lightning import load
from kvpop_lightning.config.schema import (
    BudgetConfig,
    Config,
    DataConfig,
    ModelConfig,
    PolicyConfig,
    ScorerConfig,
    TrackingConfig,
    TrainerConfig,
)
from kvpop_lightning.errors import Terminated, UserError
from kvpop_lightning.training import fit as fit_module
from kvpop_lightning.training.fit import train
from kvpop_lightning.training.runtime import say_if_nothing_drops

MODEL = ModelConfig(source="tiny-llama", name="tiny-llama")


class Data:
    """What `train` needs of a prepared DataModule."""

    fingerprint = "0123456789abcdef"
    train_rows = Rows(5)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        model=MODEL,
        policy=PolicyConfig(
            name="kvpop_mlstm",
            budget=BudgetConfig(BUDGET.sink, BUDGET.window, BUDGET.topk),
            scorer=ScorerConfig(type="mlstm", width=8, memory_dim=2, value_dim=2),
            decay_step=5,
        ),
        trainer=TrainerConfig(
            max_steps=6,
            warmup_steps=1,
            checkpoint_every=2,
            log_every=1,
            feature_cache_dir=str(tmp_path / "features"),
        ),
        tracking=TrackingConfig(enabled=False),
        run_dir=str(tmp_path / "run"),
    )


def with_trainer(config: Config, **changes: Any) -> Config:
    return replace(config, trainer=replace(config.trainer, **changes))


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(load(path).kvpop.state_dict())


def test_saves_a_policy_that_loads_and_reuses_it(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(config, data=Data())
    assert result.policy_path == Path(config.run_dir) / "policy" / "kvpop_mlstm"
    assert not result.reused
    assert result.steps == 6
    model = load(result.policy_path)
    assert model.kvpop.name == "kvpop_mlstm"
    assert model.kvpop.budget.topk < BUDGET.topk, "the state's bytes are paid for"
    first = model.kvpop.scorers[0].projection
    assert float(first.key_std.std()) > 0, "inputs are standardised by the training rows"
    for name in (
        "loss",
        "boundary",
        "boundary_accuracy",
        "final_boundary_accuracy",
        "final_rank_correlation",
        "seconds",
    ):
        assert name in result.metrics, name
    assert 0 < result.metrics["final_boundary_accuracy"] <= 1
    assert "6/6" in capsys.readouterr().err
    again = train(config, data=Data())
    assert again.reused
    assert again.policy_path == result.policy_path
    assert again.metrics == result.metrics
    assert not train(with_trainer(config, scorer_lr=1e-4), data=Data()).reused, (
        "another rate is another training"
    )
    assert train(with_trainer(config, scorer_lr=1e-4, log_every=3, progress=False), data=Data()).reused


def test_two_policies_share_a_model_and_its_features(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpop_lightning.models.sources import load_model

    computed: list[int] = []
    original = fit_module.FeatureCache.fill
    monkeypatch.setattr(
        fit_module.FeatureCache, "fill", lambda *a, **k: computed.append(original(*a, **k)) or computed[-1]
    )
    model, _ = load_model(MODEL)
    train(config, model=model, data=Data())
    mlp = replace(config, policy=replace(config.policy, name="kvpop_mlp"))
    shared = train(mlp, model=model, data=Data())
    assert computed == [5, 0]
    alone = train(replace(mlp, run_dir=config.run_dir + "2"), data=Data())
    assert all(torch.equal(w, weights(alone.policy_path)[n]) for n, w in weights(shared.policy_path).items())


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_an_interrupted_training_goes_on_and_ends_as_if_it_had_not_been(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    kind: type,
) -> None:
    whole = train(replace(config, run_dir=config.run_dir + "-whole"), data=Data())
    original = fit_module.ScorerModule.share

    def signalled(module: Any, *args: Any) -> Any:
        if module.trainer.global_step == 2:
            os.kill(os.getpid(), number)
        return original(module, *args)

    monkeypatch.setattr(fit_module.ScorerModule, "share", signalled)
    with pytest.raises(kind, match="stopped after step 3"):
        train(config, data=Data())
    assert not (Path(config.run_dir) / "policy").exists()
    monkeypatch.undo()
    capsys.readouterr()
    result = train(config, data=Data())
    assert "going on from step 3" in capsys.readouterr().out
    expected = weights(whole.policy_path)
    assert all(torch.equal(w, expected[n]) for n, w in weights(result.policy_path).items())
    assert result.metrics["final_boundary"] == whole.metrics["final_boundary"]


def test_an_interruption_in_the_last_step_comes_after_saving(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = fit_module.ScorerModule.share

    def signalled(module: Any, *args: Any) -> Any:
        if module.trainer.global_step == config.trainer.max_steps - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(module, *args)

    monkeypatch.setattr(fit_module.ScorerModule, "share", signalled)
    with pytest.raises(KeyboardInterrupt, match="trained and saved"):
        train(config, data=Data())
    monkeypatch.undo()
    assert train(config, data=Data()).reused


def test_an_interrupted_training_refuses_another_data_set_and_a_finished_one_begins_anew(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = fit_module.ScorerModule.share

    def crash(module: Any, *args: Any) -> Any:
        if module.trainer.global_step == 5:
            raise RuntimeError("the machine is gone")
        return original(module, *args)

    monkeypatch.setattr(fit_module.ScorerModule, "share", crash)
    with pytest.raises(RuntimeError, match="gone"):
        train(config, data=Data())
    monkeypatch.undo()
    other = Data()
    other.fingerprint = "fedcba9876543210"
    words = r"after step 4, was trained on 0123456789abcdef, .* gives fedcba9876543210: .*resume=false"
    with pytest.raises(UserError, match=words):
        train(config, data=other)
    train(config, data=Data())
    assert "going on from step 4" in capsys.readouterr().out
    train(config, data=other)  # every step of the other one was done: nothing is lost
    assert "starts anew" in capsys.readouterr().out


def test_a_crash_goes_on_from_the_last_periodic_checkpoint_unless_settings_changed(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = fit_module.ScorerModule.share

    def crash(module: Any, *args: Any) -> Any:
        if module.trainer.global_step == 5:
            raise RuntimeError("the machine is gone")
        return original(module, *args)

    monkeypatch.setattr(fit_module.ScorerModule, "share", crash)
    with pytest.raises(RuntimeError, match="gone"):
        train(config, data=Data())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    train(with_trainer(config, scorer_lr=1e-4), data=Data())
    assert "starts anew" in capsys.readouterr().out
    monkeypatch.setattr(fit_module.ScorerModule, "share", crash)
    with pytest.raises(RuntimeError, match="gone"):
        train(with_trainer(config, resume=False), data=Data())
    monkeypatch.undo()
    train(config, data=Data())
    assert "going on from step 4" in capsys.readouterr().out
    (Path(config.run_dir) / "checkpoints" / "kvpop_mlstm" / "last.ckpt").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"cannot read the checkpoint.*trainer\.resume=false"):
        train(with_trainer(config, max_steps=7), data=Data())


def test_fast_dev_run_goes_through_everything_and_leaves_nothing(config: Config) -> None:
    for base in ("frozen", "full"):
        fast = with_trainer(config, fast_dev_run=True, base=base)
        result = (
            train(fast, data=Data() if base == "frozen" else None) if base == "frozen" else train(_real(fast))
        )
        assert result.policy_path is None
        assert result.steps == 1
        assert "loss" in result.metrics
    assert not (Path(config.run_dir) / "policy").exists()
    assert not (Path(config.run_dir) / "checkpoints").exists()


def _real(config: Config, **data: Any) -> Config:
    """With the data room's own rows."""
    folder = str(Path(config.run_dir).parent / "data")
    settings = DataConfig(
        row_length=64,
        train_rows=4,
        eval_rows=1,
        min_document_tokens=16,
        loss_on="all",
        cache_dir=folder,
        **data,
    )
    return replace(config, data=settings)


def test_base_full_trains_and_saves_the_base_on_real_rows_and_resumes(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _real(with_trainer(config, base="full", accumulate=2, base_lr=1e-3))
    whole = train(replace(config, run_dir=config.run_dir + "-whole"))
    assert {"kl", "boundary", "loss"} <= whole.metrics.keys()
    original = fit_module.StudentModule.share

    def signalled(module: Any, *args: Any) -> Any:
        if module.trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return original(module, *args)

    monkeypatch.setattr(fit_module.StudentModule, "share", signalled)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    monkeypatch.undo()
    result = train(config)
    a, b = load(whole.policy_path), load(result.policy_path)
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    from kvpop_lightning.models.sources import load_model

    base = dict(load_model(MODEL)[0].named_parameters())
    assert any(not torch.equal(p, base[n]) for n, p in b.named_parameters() if n in base)


def test_a_stream_of_rows_trains_scorers_without_a_cache(config: Config, tmp_path: Path) -> None:
    result = train(_real(config, streaming=True))
    assert result.steps == 6
    assert not (tmp_path / "features").exists()
    assert float(load(result.policy_path).kvpop.scorers[0].projection.key_std.std()) > 0


def test_what_cannot_be_trained_is_refused_in_one_line(config: Config) -> None:
    rule = replace(config, policy=replace(config.policy, name="random+decay"))
    with pytest.raises(UserError, match=r"policy=random\+decay has no parameters.*trainer\.base=full"):
        train(rule, data=Data())

    class Empty(Data):
        train_rows = Rows(0)

    with pytest.raises(UserError, match=r"no training rows.*data\.train_rows"):
        train(config, data=Empty())


def test_out_of_gpu_memory_says_what_to_lower(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    monkeypatch.setattr(fit_module.ScorerModule, "share", exhausted)
    with pytest.raises(
        UserError, match=r"out of GPU memory.*3 GiB.*trainer\.rows_per_step.*trainer\.accumulate"
    ):
        train(config, data=Data())


def test_metrics_reach_an_open_run(config: Config) -> None:
    from kvpop_lightning.tracking import TrackedRun

    with TrackedRun(config, name="train") as run:
        train(config, data=Data())
    assert run.status == "FINISHED"
    text = (Path(config.run_dir) / "metrics.jsonl").read_text()
    for name in ("train/loss", "gradient_norm/scorer", "learning_rate/scorer", "final/boundary_accuracy"):
        assert name in text, name


@pytest.mark.parametrize(
    ("length", "said"), [(10_000, False), (BUDGET.total + 1, False), (BUDGET.total, True)]
)
def test_rows_within_the_budget_are_warned_about(
    config: Config, length: int, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    say_if_nothing_drops(replace(config, data=replace(config.data, row_length=length)))
    assert ("raise data.row_length" in capsys.readouterr().out) == said
