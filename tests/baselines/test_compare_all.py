"""`kvpop compare policies=all` from an empty folder: it trains what has to be trained and compares all."""

from __future__ import annotations

import json

import pytest

from kvpop_lightning.baselines import available, get
from kvpop_lightning.cli import main


@pytest.mark.slow
def test_every_policy_is_trained_and_has_its_cell(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["compare", "experiment=smoke", "policies=all", "tracking=none", "trainer.progress=false"]
    assert main([*command, "run_dir=run"]) == 0
    shown = capsys.readouterr().out
    table = json.loads((tmp_path / "run" / "table.json").read_text())
    entries = {e["policy"]: e for e in table}
    assert set(entries) == set(available())
    for name, e in entries.items():
        assert name in shown
        if e["kl"] is None:
            assert name in ("expected_attention", "snapkv")
            assert f"{name} at 32 keys: cannot run ({e['reason']}" in shown
            continue
        assert e["bytes_accounted"] > 0
        assert e["bounded"] is (get(name).bounded and name != "full")
        if name not in ("full", "kvpop_mlp"):
            difference = e["versus"]["kvpop_mlp"]["kl"] if "kvpop_mlp" in e["versus"] else None
            assert difference is None or difference["low"] <= difference["difference"] <= difference["high"]
        folder = tmp_path / "run" / "policy" / name
        assert folder.is_dir() is get(name).trained or name == "streaming_llm_plus"
    assert sum("kvpop_mlp" in e["versus"] for e in table) >= len(table) - 8
    figures = {path.name for path in (tmp_path / "run" / "figures").iterdir()}
    assert {"kl_vs_budget.png", "paired_differences.png"} <= figures
    # A second call has nothing to do and says the same.
    assert main([*command, "run_dir=run"]) == 0
    assert json.loads((tmp_path / "run" / "table.json").read_text()) == table
