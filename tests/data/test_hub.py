"""A data set of Nemotron-Math-v2's layout, with every odd case, through `prepare`: all rows accounted for."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvpop_lightning.config.compose import compose
from kvpop_lightning.data.document_blocks import account
from kvpop_lightning.data.fingerprint import describe, fingerprint
from kvpop_lightning.data.position import Position
from kvpop_lightning.data.prepare import load_rows, prepare
from kvpop_lightning.errors import UserError

README = """---
configs:
- config_name: default
  data_files:
  - split: high_part00
    path: data/high.part_00.jsonl
  - split: medium
    path: data/medium.jsonl
---
"""


def row(index, *, problem=None, answer="42", messages=None, tools=(), solution=None):
    problem = problem or f"What is {index} plus {index + 1}? Übung {index} 数学 🙂"
    solution = solution or " ".join(f"{index} + {k} = {index + k}." for k in range(20 + index % 9))
    talk = [
        {"role": "user", "content": problem},
        {
            "role": "assistant",
            "content": f"The answer is \\boxed{{{answer}}}.",
            "reasoning_content": solution,
        },
    ]
    return {
        "expected_answer": answer,
        "problem": problem,
        "original_expected_answer": None if index % 3 else "41",
        "changed_answer_to_majority": index % 3 == 0,
        "data_source": "aops" if index % 2 else "stackexchange_math",
        "messages": talk if messages is None else messages,
        "used_in": ["nano_v3"],
        "metadata": {"reason_high_no_tool": {"count": 8, "pass": 5, "accuracy": 0.625}},
        "license": "cc-by-4.0",
        "tools": list(tools),
        "url": None,
    }


def odd_rows():
    """200 lines and how many of them are to be dropped, by reason."""
    tool = {"type": "function", "function": {"name": "python", "parameters": {"type": "object"}}}
    called = [
        {"role": "user", "content": "Compute."},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "python"}}]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "42"},
    ]
    odd = [
        *[("tool_row", row(1000 + i, tools=[tool])) for i in range(12)],
        *[("tool_row", row(1100 + i, messages=called)) for i in range(5)],
        *[("no_answer", row(1200 + i, answer=answer)) for i, answer in enumerate((None, "", "  "))],
        *[("bad_row_empty_messages", row(1300 + i, messages=[])) for i in range(4)],
        *[("bad_row_missing_field", row(1400 + i, messages=[{"role": "user"}])) for i in range(2)],
        ("bad_row_no_assistant", row(1500, messages=[{"role": "user", "content": "Only a question?"}])),
        ("bad_row_unknown_role", row(1510, messages=[{"role": "robot", "content": "Beep."}])),
        ("bad_row_wrong_type", row(1520, messages="none")),
        *[("over_max_tokens", row(1600 + i, solution="7 + 7 = 14. " * 5200)) for i in range(3)],
        *[("duplicate", row(i)) for i in range(6)],
        ("bad_row_not_json", '{"problem": "cut off'),
        ("bad_row_not_json", b'{"problem": "\xff"}'),
    ]
    # The same problem with another solution is no duplicate, and a long document is kept, cut to the row.
    good = [row(i) for i in range(200 - len(odd) - 8)]
    good += [row(2000 + i, problem="One problem, solved often?") for i in range(5)]
    good += [row(2100 + i, solution="8 + 8 = 16. " * 700) for i in range(3)]
    lines = []
    for record in [*good, *(record for _, record in odd)]:
        text = record if isinstance(record, str | bytes) else json.dumps(record, ensure_ascii=False)
        lines.append(text if isinstance(text, bytes) else text.encode())
    return lines, Counter(reason for reason, _ in odd)


@pytest.fixture
def nemotron(tmp_path):
    folder = tmp_path / "nemotron"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text(README)
    lines, dropped = odd_rows()
    (folder / "data" / "high.part_00.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    medium = [json.dumps(row(5000 + i), ensure_ascii=False) for i in range(10)]
    (folder / "data" / "medium.jsonl").write_text("\n".join(medium) + "\n")
    shipped = compose(["data=nemotron_math_v2"]).data
    config = replace(
        shipped,
        path=str(folder),
        splits=["high_part00"],
        row_length=4096,
        too_long="truncate",
        train_rows=500,
        eval_rows=500,
        eval_share=0.0,
        cache_dir=str(tmp_path / "cache"),
    )
    return config, folder, dropped


def test_every_row_of_the_200_is_kept_or_dropped_for_a_named_reason(nemotron, tokenizer):
    pytest.importorskip("datasets")
    config, folder, dropped = nemotron
    assert (config.max_tokens, config.tools, config.require_answer) == (16384, "drop", True)
    prepared = prepare(config, tokenizer, splits=("train",), progress=False)
    rows = load_rows(prepared, "train")
    told = rows.index["account"]
    assert told["dropped"] == dict(dropped)
    assert told["read"] == 200 == told["kept"] + sum(dropped.values())
    assert rows.index["counts"]["too_long_truncated"] == 3
    assert sum(len(rows.pieces(i)) for i in range(len(rows))) == told["kept"]
    text = tokenizer.decode(rows[0]["input_ids"].tolist())
    assert "<think>\n" in text
    assert "数学 🙂" in text
    # The loss covers reasoning and answer, not the question.
    supervised = tokenizer.decode(rows[0]["input_ids"][rows[0]["loss_mask"]].tolist())
    assert "<think>" in supervised
    assert "数学" not in supervised

    # The same file read as local JSON lines gives the same rows.
    local = replace(config, source="jsonl", path=str(folder / "data" / "high.part_00.jsonl"))
    again = load_rows(prepare(local, tokenizer, splits=("train",), progress=False), "train")
    assert len(again) == len(rows)
    assert all((a["input_ids"] == b["input_ids"]).all() for a, b in zip(rows, again, strict=True))


def test_splits_other_shares_and_what_the_fingerprint_sees(nemotron, tokenizer):
    pytest.importorskip("datasets")
    config, folder, _ = nemotron
    config = replace(config, splits=["medium", "high_part00"], eval_share=0.2)
    prepared = prepare(config, tokenizer, progress=False)
    train, evaluation = (load_rows(prepared, split).index["account"] for split in ("train", "eval"))
    assert train["read"] == evaluation["read"] == 210
    before = {
        name: n for name, n in train["dropped"].items() if name not in ("other_split", "over_max_tokens")
    }
    others = train["dropped"]["other_split"] + evaluation["dropped"]["other_split"]
    assert others == 210 - sum(before.values())
    assert evaluation["kept"] > 10
    name = fingerprint(describe(config, tokenizer))
    assert fingerprint(describe(replace(config, splits=["medium"]), tokenizer)) != name
    assert fingerprint(describe(replace(config, max_tokens=99), tokenizer)) != name
    assert fingerprint(describe(replace(config, processes=2), tokenizer)) == name
    with (folder / "data" / "medium.jsonl").open("a") as stream:
        stream.write(json.dumps(row(1)) + "\n")
    assert fingerprint(describe(config, tokenizer)) != name
    with pytest.raises(
        UserError, match=r"has no split high_part09; it has high_part00, medium; .*README\.md.*data=jsonl"
    ):
        prepare(replace(config, splits=["high_part09"]), tokenizer, progress=False)


def test_a_data_set_that_cannot_be_reached_is_one_line(nemotron, tokenizer, monkeypatch):
    import huggingface_hub

    config, _, _ = nemotron

    def away(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", away)
    with pytest.raises(UserError, match=r"data\.path=owner/name .*no route\); check the name") as error:
        prepare(replace(config, path="owner/name", revision="main"), tokenizer, progress=False)
    assert "\n" not in str(error.value)
    # A commit is known without the network, so prepared rows are found again without it.
    pinned = replace(config, path="owner/name", revision="0" * 40)
    assert describe(pinned, tokenizer)["identity"]["revision"] == "0" * 40


def test_a_branch_is_one_data_set_per_commit_and_the_shipped_revision_is_a_commit(
    nemotron, tokenizer, monkeypatch
):
    import huggingface_hub

    shipped = compose(["data=nemotron_math_v2"]).data
    assert re.fullmatch("[0-9a-f]{40}", shipped.revision)
    config, _, _ = nemotron
    branch = replace(config, path="owner/name", revision="main")
    described = []
    for head in ("a" * 40, "b" * 40):  # somebody pushes to the branch
        answer = SimpleNamespace(sha=head)
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, answer=answer, **__: answer)
        described.append(describe(branch, tokenizer))
    assert [found["identity"]["revision"] for found in described] == ["a" * 40, "b" * 40]
    before, after = (
        Position(fingerprint(found), 0, "rows") for found in described
    )  # a training that began before refuses the rows of after
    with pytest.raises(UserError, match="the data set changed"):
        after.load_state_dict(before.state_dict())
    assert fingerprint(describe(replace(branch, revision="a" * 40), tokenizer)) == before.fingerprint


def test_an_account_that_does_not_add_up_is_not_written():
    assert account({"rows": 3, "documents": 2, "duplicate": 1})["dropped"] == {"duplicate": 1}
    with pytest.raises(AssertionError, match="3 rows read, 2 accounted for"):
        account({"rows": 3, "documents": 2})
