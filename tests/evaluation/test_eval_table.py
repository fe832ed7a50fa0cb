"""The table's three forms: JSON, terminal, markdown."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from kvpop_lightning.evaluation.table import (
    add_intervals,
    best_learned,
    budgets_of,
    entry,
    markdown,
    summary_lines,
    terminal_table,
    write_table,
)

KL = {"streaming_llm": 0.4, "random+decay": 0.3, "kvpop_mlp": 0.2, "kvpop_mlstm": 0.25, "oracle": 0.1}


def record(row, kl):
    mass = [[0.5, 0.7], [0.9, None]]
    return {"row": row, "kl": kl, "top1": 1 - kl, "nll": 1 + kl, "positions": 10, "retained_mass": mass}


@pytest.fixture
def table():
    result = [entry("full", 256, 256, [record(n, 0.0) for n in range(3)], bytes_held=8, bytes_accounted=4)]
    for policy, kl in KL.items():
        for budget, factor in ((64, 1.0), (32, 2.0)):
            rows = [record(n, kl * factor * (1 + 0.1 * n)) for n in range(3)]
            result.append(
                entry(policy, budget, 256, rows, bytes_held=budget * 2**14, bytes_accounted=budget * 2**13)
            )
    add_intervals(result)
    return result


def test_entries_average_rows_and_heads(table):
    one = table[1]
    assert one["compression"] == 0.75
    assert one["kl"] == pytest.approx(0.4 * 1.1)
    assert one["retained_mass"] == pytest.approx((0.5 + 0.7 + 0.9) / 3)
    assert one["retained_mass_by_head"][0] == pytest.approx([0.5, 0.7])
    assert one["retained_mass_by_head"][1] == [pytest.approx(0.9), None]
    assert one["boundary_accuracy"] is None
    assert one["boundary_accuracy_by_head"] is None
    assert budgets_of(table) == [64, 32]
    assert best_learned(table, 64)["policy"] == "kvpop_mlp"


def test_differences_are_paired_against_every_learned_policy(table):
    streaming = next(e for e in table if e["policy"] == "streaming_llm" and e["budget"] == 64)
    interval = streaming["versus"]["kvpop_mlp"]["kl"]
    assert interval["difference"] == pytest.approx(0.22)
    assert interval["low"] < 0.22 < interval["high"]
    assert set(streaming["versus"]) == {"kvpop_mlp", "kvpop_mlstm"}
    mlp = next(e for e in table if e["policy"] == "kvpop_mlp" and e["budget"] == 64)
    assert set(mlp["versus"]) == {"kvpop_mlstm"}
    assert table[0]["versus"] == {}  # `full` shares its budget with nobody


def test_the_written_table_is_strict_json_with_the_promised_fields(table, tmp_path):
    path, text = write_table(table, tmp_path)
    read = json.loads(path.read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert read == table
    for e in read:
        assert {
            "policy",
            "compression",
            "budget",
            "kl",
            "top1",
            "perplexity",
            "bytes_held",
            "rows",
        } <= e.keys()
    assert text.read_text() == markdown(table)
    assert not list(tmp_path.glob(".*"))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert set(metrics) == {"full", *KL}
    assert metrics["kvpop_mlp"]["64"] == {"kl": pytest.approx(0.22), "top1": pytest.approx(1 - 0.22)}


def test_the_terminal_table_fits_80_columns(table):
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(terminal_table(table))
    plain = console.export_text(clear=False, styles=False)
    assert all(len(line) <= 80 for line in plain.splitlines())
    assert "…" not in plain
    for policy in KL:
        assert policy in plain
    assert "0.2200" in plain  # kvpop_mlp at 64 keys
    styled = console.export_text(styles=True)
    assert "\x1b[1;32m0.2200" in styled  # the best learned policy is bold
    assert "\x1b[1;32m0.2750" not in styled


def test_markdown_has_every_metric_and_bold_winners(table):
    text = markdown(table)
    assert "| kvpop_mlp | **0.2200** | **0.4400** |" in text
    assert "| kvpop_mlstm | 0.2750 | 0.5500 |" in text
    assert "| policy | 64 keys (75%) | 32 keys (88%) |" in text
    assert "Bytes held per sequence (measured)" in text


def test_summary_compares_with_the_best_rule_but_not_with_the_oracle(table):
    lines = summary_lines(table)
    assert len(lines) == 2
    assert lines[0].startswith(
        "budget 64: kvpop_mlp 0.2200, best other random+decay 0.3300, that minus kvpop_mlp +0.1100 ["
    )
