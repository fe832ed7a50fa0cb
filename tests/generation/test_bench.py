"""`kvpop bench decode` on the CPU: every path runs, what is written says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvpop_lightning import BoundedCache, retrofit
from kvpop_lightning.cli import main
from kvpop_lightning.generation.bench import run, states
from kvpop_lightning.generation.bench.cells import cells
from kvpop_lightning.generation.bench.timing import summary
from kvpop_lightning.models.tiny import tiny_model
from kvpop_lightning.policy import Budget


def test_command_writes_json_table_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["lengths=[40,160]", "batches=[1,2]", "steps=3", "warmup=1", "budget=32", "prompt=200"]
    names = ["full", "streaming_llm", "dms", "kvpop_mlp", "kvpop_mlstm"]
    words += [f"contestants=[{','.join(names)}]", "chunk=64", "run_dir=run", "model.device=cpu"]
    assert main(["bench", "decode", *words, "policy.scorer.memory_dim=4", "policy.scorer.value_dim=4"]) == 0
    out, err = capsys.readouterr()
    assert "bench decode  21/21" in err
    folder = tmp_path / "run" / "bench"
    report = json.loads((folder / "decode.json").read_text())
    cells = {(c["contestant"], c["rows"], c["length"]): c for c in report["cells"]}
    assert cells.keys() == {(n, rows, length) for n in names for rows in (1, 2) for length in (40, 160)}
    for cell in cells.values():
        assert 0 < cell["median_ms"] <= cell["p95_ms"]
        assert cell["tokens_per_s"] == pytest.approx(1000 * cell["rows"] / cell["mean_ms"], rel=0.01, abs=0.1)
        assert cell["memory"] == "counted"
        scorers = cell["peak_bytes"] - report["weight_bytes"] - cell["cache_bytes"]
        assert scorers == 0 if cell["contestant"] in ("full", "streaming_llm") else scorers > 0
    held = {name: [cells[name, 1, n]["cache_bytes"] for n in (40, 160)] for name in names}
    for name in ("streaming_llm", "kvpop_mlp", "kvpop_mlstm"):
        assert held[name][0] == held[name][1]
    assert held["kvpop_mlstm"][0] <= held["kvpop_mlp"][0]
    assert held["full"][1] > 3 * held["full"][0]
    assert held["full"][1] > held["dms"][1] > held["dms"][0]
    assert report["prompt"]["tokens"] == 200
    assert report["prompt"]["finite"]
    assert {path.name for path in folder.iterdir()} == {
        "decode.json", "decode.md", "decode_latency.png", "decode_memory.png",
    }  # fmt: skip
    assert f"{cells['full', 1, 40]['median_ms']:.3f}" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "train"], "kvpop bench decode"),
        (["bench", "decode", "lengths=[64,32]"], "bench.lengths"),
        (["bench", "decode", "contestants=[oracle]"], "bench.contestants"),
        (["bench", "decode", "budget=3"], "bench.budget"),
        (["bench", "decode", "batches=[2,0]"], "bench.batches=[2, 0]"),
        (["bench", "decode", "contestants=[]"], "name at least one"),
        (["bench", "decode", "contestants=foo"], "known: full, "),
    ],
)
def test_refusals(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_interrupted_it_leaves_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(model: object, contestant: str, *more: object, **options: object) -> object:
        if contestant == "kvpop_mlp":
            raise KeyboardInterrupt
        return cells(model, contestant, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "cells", pressed)
    words = ["contestants=[streaming_llm,kvpop_mlp]", "lengths=[70]", "batches=[1]", "steps=2", "warmup=1"]
    assert main(["bench", "decode", *words, f"run_dir={tmp_path}", "model.device=cpu"]) == 130
    (cell,) = json.loads((tmp_path / "bench" / "decode.json").read_text())["cells"]
    assert cell["contestant"] == "streaming_llm"
    assert "interrupted" in capsys.readouterr().err


def test_summary_of_times() -> None:
    found = summary([*range(1, 101), 1000])
    assert (found["median_ms"], found["p95_ms"]) == (51, 96)


def test_hand_filled_caches_stand_where_they_say() -> None:
    """The caches that are filled by hand go on like any other."""
    model = tiny_model("qwen3", kv_heads=2)
    cache = states.dynamic_cache(model, 2, 30)
    assert cache.get_seq_length() == 30
    assert states.read_text_rows(model, cache, torch.full((2, 1), 5)).isfinite().all()
    static = states.static_cache(model, 1, 30, 4)
    dynamic = states.dynamic_cache(model, 1, 30)
    for ours, theirs in zip(static.layers, dynamic.layers, strict=True):
        ours.keys[:, :, :30], ours.values[:, :, :30] = theirs.keys, theirs.values
    token = torch.full((1, 1), 5)
    wanted = states.read_text_rows(model, dynamic, token)
    assert torch.allclose(states.read_text_rows(model, static, token), wanted, atol=1e-5)
    retrofit(model, Budget(2, 8, 6), policy="dms")
    ragged = BoundedCache(model, record=False)
    states.advance(model, ragged, 2, 108, reduction=4.0, chunk=50)
    assert ragged.keys_per_head()[0].tolist() == [[12 + 8, 37 + 8]] * 2
    assert ragged.tokens_seen == 108
    assert states.read_text_rows(model, ragged, torch.full((2, 1), 5)).isfinite().all()
    states.advance(model, ragged, 2, 208, reduction=4.0, chunk=50)
    assert ragged.keys_per_head()[0].tolist() == [[25 + 8, 75 + 8]] * 2
