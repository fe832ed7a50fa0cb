"""FLOPs by hand, and the metrics of a real small training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvpop_lightning.models.tiny import tiny_model
from kvpop_lightning.tracking.flops import DecoderShape, StepCost, listed_peak, measured_peak, peak_flops


def test_a_forward_counts_what_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = tiny_model(attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(2, 24, dtype=torch.int64), use_cache=False)
    # Eager attention computes all T x T products; the mask halves what is needed.
    assert counter.get_total_flops() == DecoderShape.of(model).forward(48, 2 * 24 * 24, head=True)


def test_a_step_counts_teacher_student_and_scorers() -> None:
    base = DecoderShape(weights=100, head_weights=10, layers=2, query_heads=3, head_dim=4)
    assert base.forward(5, 7, head=False) == 2 * 100 * 5 + 4 * 2 * 3 * 4 * 7
    assert StepCost(None, 11).flops(5, 7, 6) == 6 * 11 * 5
    assert StepCost(base, 11).flops(5, 7, 6) == 6 * 11 * 5 + base.forward(5, 7, head=False)
    full = StepCost(base, 11, trains_base=True).flops(5, 7, 6)
    assert full == 6 * 11 * 5 + base.forward(5, 7, head=True) + 3 * base.forward(5, 6, head=True)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA Unheard 9", None),
    ],
)
def test_peaks_by_name(name: str, tflops: float | None) -> None:
    assert listed_peak(name) == (None if tflops is None else tflops * 1e12)


def test_the_peak_of_a_cpu_is_measured_unless_given() -> None:
    assert peak_flops(torch.device("cpu"), 2.5) == 2.5e12
    state = torch.get_rng_state()
    assert 1e8 < measured_peak(128, 0.01) < 1e14
    assert torch.equal(torch.get_rng_state(), state)


def test_a_training_logs_throughput_fingerprint_and_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvpop_lightning.cli import main

    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    words = ["experiment=smoke", "policy=kvpop_mlp", "trainer.log_every=2", "tracking.peak_tflops=0.001"]
    assert main(["train", *words, "run_dir=runs/a"]) == 0
    lines = [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "throughput/tokens_per_s" in line]
    assert [line["step"] for line in logged] == [1, 3]
    last = logged[-1]
    assert last["throughput/tokens_per_s"] > last["throughput/rows_per_s"] > 0
    assert last["throughput/mfu"] == pytest.approx(last["throughput/tflops_per_device"] / 0.001, rel=1e-5)
    capsys.readouterr()
    assert main(["runs", "show", "smoke train kvpop_mlp", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tags"]["data.fingerprint"]
    assert {"policy/kvpop_mlp/kvpop.json", "policy/kvpop_mlp/kvpop.safetensors"} <= set(
        shown["artifact_files"]
    )
    assert main(["runs", "register", "smoke train kvpop_mlp", "--name", "mine"]) == 0
    assert "models:/mine/1 registered" in capsys.readouterr().out
