from __future__ import annotations

import errno
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvpop_lightning.data import prepare as prepare_module
from kvpop_lightning.data import rows as rows_module
from kvpop_lightning.data.fingerprint import describe, fingerprint
from kvpop_lightning.data.packing import Piece
from kvpop_lightning.data.prepare import load_rows, prepare
from kvpop_lightning.data.rows import PackedRows
from kvpop_lightning.errors import UserError


def same(a: PackedRows, b: PackedRows) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x
    )


def test_rows_follow_the_contract(config, tokenizer):
    prepared = prepare(config, tokenizer)
    train, evaluation = load_rows(prepared, "train"), load_rows(prepared, "eval")
    assert (len(train), len(evaluation)) == (11, 2)
    for index, row in enumerate(train):
        documents = row["document_ids"]
        assert row["row"] == index
        assert all(
            row[name].shape == (256,) for name in ("input_ids", "position_ids", "document_ids", "loss_mask")
        )
        real = documents >= 0
        assert (documents[real].diff() >= 0).all()
        assert not (row["loss_mask"] & ~real).any()
        pieces = train.pieces(index)
        assert [int((documents == i).sum()) for i in range(len(pieces))] == [
            piece["tokens"] for piece in pieces
        ]
        assert {piece["family"] for piece in pieces} <= {"ledger", "codebook", "long_division"}
    index = train.index
    assert index["tokens"] == sum(int((row["document_ids"] >= 0).sum()) for row in train)
    assert index["supervised_tokens"] == sum(int(row["loss_mask"].sum()) for row in train)
    text = tokenizer.decode(train[0]["input_ids"][train[0]["document_ids"] == 0].tolist())
    assert text.startswith("<|im_start|>user\n")
    # A supervised token is the assistant's: the text before the first one ends with the assistant's header.
    first = int(train[0]["loss_mask"].nonzero()[0])
    assert tokenizer.decode(train[0]["input_ids"][:first].tolist()).endswith("<|im_start|>assistant\n")


def test_an_evaluation_row_is_one_document_of_a_held_out_family(config, tokenizer):
    rows = load_rows(prepare(replace(config, eval_rows=3, eval_families=["held_out"]), tokenizer), "eval")
    for row in rows:
        assert torch.equal(row["position_ids"], torch.arange(256))
        assert (row["document_ids"] == 0).all()
    assert len({rows.pieces(index)[0]["family"] for index in range(3)}) == 3


def test_a_second_run_reuses_and_the_order_of_runs_does_not_matter(config, tokenizer, tmp_path, monkeypatch):
    first = prepare(config, tokenizer)
    monkeypatch.setattr(prepare_module, "make_blocks", None)
    again = prepare(config, tokenizer)
    assert (first.reused, again.reused, again.folder) == (False, True, first.folder)
    monkeypatch.undo()
    other = prepare(replace(config, cache_dir=str(tmp_path / "other")), tokenizer)
    assert other.fingerprint == first.fingerprint
    assert same(load_rows(first, "train"), load_rows(other, "train"))


def test_more_rows_extend_the_same_rows(config, tokenizer):
    few = load_rows(prepare(config, tokenizer), "train")
    many = load_rows(prepare(replace(config, train_rows=20), tokenizer), "train")
    assert all(torch.equal(few[i]["input_ids"], many[i]["input_ids"]) for i in range(len(few)))


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"row_length": 200}, {"loss_on": "all"}, {"families": ["ledger"]}, {"train_rows": 12}],
)
def test_the_fingerprint_sees_every_change(config, tokenizer, change):
    before = fingerprint(describe(config, tokenizer))
    assert fingerprint(describe(replace(config, **change), tokenizer)) != before
    assert (
        fingerprint(describe(replace(config, cache_dir="elsewhere", workers=3, name="n"), tokenizer))
        == before
    )


def test_short_problems_fill_the_rows(config, tokenizer):
    asked = replace(
        config, families=["ledger", "reasoning_gym"], row_length=512, max_document_tokens=400, train_rows=16
    )
    rows = load_rows(prepare(asked, tokenizer), "train")
    assert rows.index["packing_efficiency"] > 0.9
    assert "reasoning_gym" in {piece["family"] for i in range(16) for piece in rows.pieces(i)}


@pytest.mark.parametrize("kill_at", [1, 2])
def test_a_killed_run_goes_on_where_it_was(config, tokenizer, tmp_path, monkeypatch, kill_at):
    monkeypatch.setattr(prepare_module, "TOKENS_PER_SHARD", 256 * 16)
    asked = replace(config, train_rows=40)
    whole = load_rows(prepare(replace(asked, cache_dir=str(tmp_path / "whole")), tokenizer), "train")
    assert len(whole.index["shards"]) == 3
    written = []

    def dying(folder, number, rows, *rest):
        if number == kill_at:
            (folder / "tokens-00009.npy.tmp").write_bytes(b"half")
            raise KeyboardInterrupt
        written.append(number)
        return rows_module.write_shard(folder, number, rows, *rest)

    monkeypatch.setattr(prepare_module, "write_shard", dying)
    with pytest.raises(KeyboardInterrupt):
        prepare(asked, tokenizer)
    folder = Path(asked.cache_dir) / fingerprint(describe(asked, tokenizer))
    with pytest.raises(UserError, match="no prepared rows"):
        PackedRows(folder / "train")
    kill_at = -1
    before = list(written)
    resumed = load_rows(prepare(asked, tokenizer), "train")
    # Shards finished before were not made again (the last numbers belong to the evaluation split).
    assert written[len(before) : len(before) + 3 - len(before)] == list(range(len(before), 3))
    assert same(whole, resumed)
    assert whole.index["counts"] == resumed.index["counts"]
    assert not list(folder.rglob("*.tmp"))
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize(
    "name", ["tokens-00000.npy", "documents-00000.npy", "loss-00000.npy", "pieces-00000.jsonl"]
)
def test_damage_is_detected_and_named(config, tokenizer, name):
    prepared = prepare(config, tokenizer)
    file = prepared.folder / "train" / name
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(UserError, match=rf"{name} has .* bytes, the index says"):
        load_rows(prepared, "train")
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=rf"{name} does not have the content"):
        load_rows(prepared, "train")
    file.unlink()
    with pytest.raises(UserError, match=rf"{name} is missing"):
        load_rows(prepared, "train")


def test_no_space_left_is_one_clear_line_and_leaves_nothing_half_written(config, tokenizer, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rows_module.np, "save", full)
    with pytest.raises(UserError, match=r"no space left .*tokens-00000\.npy; .*data\.cache_dir") as error:
        prepare(config, tokenizer)
    assert "\n" not in str(error.value)
    folder = Path(config.cache_dir) / fingerprint(describe(config, tokenizer))
    assert not [path for path in folder.rglob("*") if path.is_file()]
    monkeypatch.undo()
    assert not prepare(config, tokenizer).reused


def test_shards_are_memory_mapped_and_small(config, tokenizer):
    rows = load_rows(prepare(config, tokenizer), "train")
    rows[3]
    tokens, documents, loss = rows._arrays(0)
    assert isinstance(tokens, np.memmap)
    assert tokens.dtype == np.uint16
    assert (tokens.shape, documents.shape, loss.shape) == ((11, 256),) * 3
    with pytest.raises(IndexError):
        rows[11]
    assert torch.equal(rows[-1]["input_ids"], rows[10]["input_ids"])


def write_jsonl(path, count, words=30):
    lines = []
    for i in range(count):
        solution = " ".join(f"{j} + {i} = {i + j}." for j in range(words + i % 7))
        lines.append(json.dumps({"problem": f"Add {i} many times.", "solution": solution}))
    path.write_text("\n".join(lines) + "\n")
    return lines


def test_files_every_row_is_accounted_for_and_split_by_document(config, tokenizer, tmp_path):
    lines = write_jsonl(tmp_path / "a.jsonl", 120)
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, lines[5], '{"problem": "x"}']) + "\n")
    asked = replace(
        config,
        source="jsonl",
        path=str(tmp_path / "a.jsonl"),
        on_bad_row="skip",
        train_rows=1000,
        eval_rows=1000,
        eval_single_document=False,
        row_length=700,
    )
    prepared = prepare(asked, tokenizer)
    hashes = {}
    for split in ("train", "eval"):
        rows = load_rows(prepared, split)
        counts = rows.index["counts"]
        assert counts["rows"] == 122
        dropped = sum(counts.get(name, 0) for name in ("bad_row_missing_field", "duplicate", "other_split"))
        assert counts["kept"] + dropped == 122
        assert counts["documents"] == counts["kept"]
        assert counts["bad_row_missing_field"] == 1
        hashes[split] = Counter(piece["hash"] for i in range(len(rows)) for piece in rows.pieces(i))
        assert len(hashes[split]) == counts["documents"]
    assert len(hashes["train"]) + len(hashes["eval"]) == 120
    assert not hashes["train"].keys() & hashes["eval"].keys()
    assert len(hashes["eval"]) > 2
    # The same file under another name is the same data; another content is not.
    (tmp_path / "moved").mkdir()
    (tmp_path / "a.jsonl").rename(tmp_path / "moved" / "a.jsonl")
    moved = replace(asked, path=str(tmp_path / "moved" / "a.jsonl"))
    assert fingerprint(describe(moved, tokenizer)) == prepared.fingerprint
    write_jsonl(tmp_path / "moved" / "a.jsonl", 119)
    assert fingerprint(describe(moved, tokenizer)) != prepared.fingerprint


def test_a_problem_of_the_evaluation_file_is_not_trained_on(config, tokenizer, tmp_path):
    lines = write_jsonl(tmp_path / "a.jsonl", 20)
    (tmp_path / "eval.jsonl").write_text("\n".join(lines[:4]) + "\n")
    asked = replace(
        config, source="jsonl", path=str(tmp_path / "a.jsonl"), eval_path=str(tmp_path / "eval.jsonl"),
        train_rows=50, eval_rows=9, row_length=128,
    )  # fmt: skip
    prepared = prepare(asked, tokenizer)
    train, evaluation = load_rows(prepared, "train"), load_rows(prepared, "eval")
    assert train.index["counts"]["problem_in_evaluation"] == 4
    assert train.index["counts"]["documents"] == 16
    assert len(evaluation) == 4
    assert evaluation.index["rows_asked"] == 9
    nothing = replace(asked, eval_path=None, eval_share=0.0)
    with pytest.raises(UserError, match=r"no eval rows .*raise data\.eval_share or give data\.eval_path"):
        prepare(nothing, tokenizer)


def test_unusable_settings_say_what_to_do(config, tokenizer, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", 40, words=2)
    files = replace(config, source="jsonl", path=str(tmp_path / "a.jsonl"))
    cases = [
        (
            replace(config, source="csv"),
            "data.source must be procedural, jsonl, parquet, arrow or hub, got 'csv'",
        ),
        (replace(config, families=["ledgr"]), "unknown problem family 'ledgr'"),
        (replace(config, eval_families=["reasoning_gym"]), "too short for data.eval_single_document"),
        (replace(config, train_rows=0), "data.train_rows must be at least 1"),
        (replace(config, too_long="cut"), "data.too_long must be one of"),
        (replace(files, path=None), "data.path is not set"),
        (replace(files, row_length=2000), "lower data.row_length, set data.eval_single_document=false"),
        (replace(files, eval_share=1.0), "all are set aside for evaluation: lower data.eval_share"),
        (replace(config, train_rows=None), "data.train_rows must be set: the problems"),
        (replace(files, row_length=8, too_long="drop"), "raise data.row_length or set data.too_long=trunc"),
        (
            replace(files, max_tokens=3),
            "longer than data.max_tokens: raise it (other_split 7, over_max_tokens 33,",
        ),
    ]
    for asked, words in cases:
        with pytest.raises(UserError) as error:
            prepare(asked, tokenizer)
        assert words in str(error.value)
        assert "_needed 0" not in str(error.value), "what did not happen is not told"
        assert "\n" not in str(error.value)


def test_a_piece_never_exceeds_its_row():
    with pytest.raises(AssertionError, match="overfull"):
        rows_module.assemble([Piece(np.ones(5, np.int32), np.ones(5, bool), "", "", "")], 4)


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_rest(tmp_path):
    file = tmp_path / "index.json"
    rows_module.write_json(file, {"a": 1})

    def full(stream):
        stream.write(b"half")
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with pytest.raises(UserError, match="no space left"):
        rows_module.write_whole(file, full)
    assert [path.name for path in tmp_path.iterdir()] == ["index.json"]
    assert json.loads(file.read_text()) == {"a": 1}


@pytest.mark.parametrize(
    ("counts", "hint"),
    [
        ({"too_long_dropped": 69, "contaminated": 3, "rows": 120}, "raise data.row_length"),
        ({"too_long_dropped": 2, "contaminated": 30}, "data.decontaminate=report"),
        ({"over_max_tokens": 5}, "data.max_tokens: raise it"),
        ({"rows": 4}, "no document of the source can be used"),
    ],
)
def test_the_cause_named_is_the_one_that_took_most(config, counts, hint):
    assert hint in prepare_module._no_rows(config, "train", Counter(counts))
