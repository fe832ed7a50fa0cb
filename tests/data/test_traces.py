"""Traces of a toy teacher: provenance, the same bytes after a stop, and their way into packed rows."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace

import pytest

from kvpop_lightning.cli import main
from kvpop_lightning.config.compose import compose
from kvpop_lightning.data import traces
from kvpop_lightning.data.chat import ChatRenderer
from kvpop_lightning.data.prepare import load_rows, prepare
from kvpop_lightning.errors import UserError
from kvpop_lightning.generation import Engine, Sampling
from kvpop_lightning.models.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def teacher():
    """A random model ends about one text in 272 tokens; a bias makes it one in ten."""
    import torch

    model, tokenizer = tiny_model("llama", max_position_embeddings=512, tied=False), tiny_tokenizer()
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(head.out_features))
    with torch.no_grad():
        head.bias[tokenizer.eos_token_id] = 2.5
    return model, tokenizer


@pytest.fixture
def config(tmp_path):
    rows = [
        {"problem": "What is 2 + 2?", "expected_answer": "4"},
        {"messages": [{"role": "user", "content": "Übung: 3 · 3?"}]},
        {"problem": "What  is 2 + 2?", "expected_answer": "4"},  # the first one again
        *({"problem": f"What is {n} - 1?", "answer": n - 1} for n in range(8)),
    ]
    (tmp_path / "problems.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    words = [
        "model=tiny_llama",
        "data=jsonl",
        f"data.path={tmp_path}/problems.jsonl",
        f"run_dir={tmp_path}/run",
    ]
    settings = ["temperature=1.0", "top_p=1.0", "max_new_tokens=40", "samples=2", "slots=3", "problems=null"]
    return compose([*words, *(f"data.traces.{word}" for word in settings)], command="data")


def changed(config, **values):
    return replace(config, data=replace(config.data, traces=replace(config.data.traces, **values)))


def test_every_problem_is_solved_with_its_provenance_and_becomes_rows(teacher, config, tmp_path):
    model, tokenizer = teacher
    told = traces.sample(model, tokenizer, config, progress=False)
    assert told.path == tmp_path / "run" / "traces.jsonl"
    lines = [json.loads(line) for line in traces.journal_of(told.path).read_text().splitlines()]
    header, sampled = lines[0], lines[1:]
    assert len(sampled) == 10 * 2 == told.ended["end"] + told.ended["length"]
    assert min(told.ended["end"], told.ended["length"]) > 2, "both kinds must occur for this test to say much"
    assert told.ended["skipped_same_problem"] == 1
    kept = [json.loads(line) for line in told.path.read_text().splitlines()]
    assert kept == [row for row in sampled if row["provenance"]["finish"] == "end"]
    assert told.exact == sum(row["provenance"]["exact"] for row in sampled) < 20  # half a character may occur
    first = sampled[0]
    assert first["problem"] == first["messages"][0]["content"] == "What is 2 + 2?"
    assert (first["expected_answer"], sampled[4]["expected_answer"]) == ("4", "-1")
    assert "expected_answer" not in sampled[2]
    how = first["provenance"]
    assert (how["model"], how["temperature"], how["max_new_tokens"]) == ("tiny-llama", 1.0, 40)
    assert how["weights"] == header["weights"]
    assert (how["seed"], how["sample"], sampled[1]["provenance"]["sample"]) == (config.seed, 0, 1)
    assert how["origin"] == "problems.jsonl:1"

    # What was sampled is what the model says alone to the same prompt with the same seed.
    prompt, opening = traces.prompt_of(ChatRenderer(tokenizer), "What is 2 + 2?")
    assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")
    assert opening == ""
    settings = Sampling(40, 1.0, seed=traces._seed(config.seed, "What is 2 + 2?", 0))
    alone = Engine(model, tokenizer, slots=1).generate([prompt], settings)[0][0]
    assert alone.text == first["messages"][1]["content"]

    data = replace(
        compose(["data=teacher_traces", f"data.path={told.path}"], command="prepare").data,
        eval_share=0.0, row_length=256, train_rows=99, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    empty = sum(not row["messages"][1]["content"].strip() for row in kept)
    rows = load_rows(prepare(replace(data, on_bad_row="skip"), tokenizer, splits=("train",)), "train")
    told_rows = rows.index["account"]
    assert told_rows["read"] == len(kept)
    assert sum(told_rows["dropped"].values()) <= empty + len(kept) - len({str(r["messages"]) for r in kept})


@pytest.mark.parametrize("cut", ["between", "in a line", "in the first line"])
def test_an_interrupted_call_goes_on_and_gives_the_same_bytes(teacher, config, tmp_path, cut, monkeypatch):
    config = changed(config, problems=4)
    whole = traces.sample(*teacher, changed(config, path=str(tmp_path / "whole.jsonl")), progress=False)
    asked = changed(config, path=str(tmp_path / "cut.jsonl"))
    write, left = traces._write, 0 if cut == "in the first line" else 8

    def dying(stream, content):
        nonlocal left
        if left == 0:
            if cut != "between":
                stream.write(json.dumps(content).encode()[:30])
            raise KeyboardInterrupt
        left -= 1
        write(stream, content)

    monkeypatch.setattr(traces, "_write", dying)
    with pytest.raises(KeyboardInterrupt):
        traces.sample(*teacher, asked, progress=False)
    assert not (tmp_path / "cut.jsonl").exists()
    monkeypatch.undo()
    resumed = traces.sample(*teacher, asked, progress=False)
    assert resumed.reused == (0 if cut == "in the first line" else 7)
    assert resumed.path.read_bytes() == whole.path.read_bytes()
    assert traces.journal_of(resumed.path).read_bytes() == traces.journal_of(whole.path).read_bytes()
    # A finished call samples nothing again, slots change nothing, other settings are refused.
    monkeypatch.setattr(Engine, "step", None)
    assert traces.sample(*teacher, changed(asked, slots=2), progress=False).reused == 8
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"another temperature, seed; give another data\.traces\.path"):
        traces.sample(*teacher, replace(changed(asked, temperature=0.5), seed=9), progress=False)


def test_the_first_problems_of_more_are_the_same(teacher, config, tmp_path):
    few = changed(config, path=str(tmp_path / "a.jsonl"), problems=3)
    traces.sample(*teacher, few, progress=False)
    told = traces.sample(*teacher, changed(few, problems=5), progress=False)
    assert told.reused == 6
    other = changed(config, path=str(tmp_path / "b.jsonl"), problems=5, slots=1)
    assert traces.sample(*teacher, other, progress=False).path.read_bytes() == told.path.read_bytes()


def test_procedural_problems_are_asked_and_their_answers_kept(teacher, config):
    asked = replace(config, data=replace(config.data, source="procedural", min_document_tokens=60))
    asked = replace(asked, data=replace(asked.data, max_document_tokens=90, families=["ledger", "codebook"]))
    with pytest.raises(UserError, match=r"data\.traces\.problems must be set"):
        traces.sample(*teacher, asked, progress=False)
    found = [
        one
        for one, _ in zip(traces.problems(asked.data, ChatRenderer(teacher[1]), {}), range(4), strict=False)
    ]
    assert [one.origin.split()[0] for one in found] == ["ledger", "codebook"] * 2
    assert all(one.answer for one in found)
    assert len({one.text for one in found}) == 4


def test_a_reasoning_models_opening_belongs_to_the_trace():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    prompt, opening = traces.prompt_of(ChatRenderer(tokenizer), "Why?")
    assert opening == "<think>\n"
    assert tokenizer.decode(prompt).endswith("<think>\n")
    tokenizer.chat_template = None
    prompt, opening = traces.prompt_of(ChatRenderer(tokenizer), "Why?")
    assert (tokenizer.decode(prompt).endswith("### assistant\n"), opening) == (True, "")


def test_no_space_and_bad_rows_are_one_line(teacher, config, tmp_path, monkeypatch):
    class Full(traces.FileIO):
        def write(self, data):
            if self.tell() > 1500:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(bytes(data)[:100])  # also: a write that takes a part only

    monkeypatch.setattr(traces, "FileIO", Full)
    one = changed(config, problems=1, samples=1, path=str(tmp_path / "parts.jsonl"))
    assert traces.sample(*teacher, one, progress=False).ended.total() == 1
    full = changed(config, problems=4, path=str(tmp_path / "full.jsonl"))
    with pytest.raises(UserError, match=r"no space left .*full\.jsonl\.journal") as error:
        traces.sample(*teacher, full, progress=False)
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    with (tmp_path / "problems.jsonl").open("a") as stream:
        stream.write('{"solution": "42"}\n{half\n')
    asked = changed(config, path=str(tmp_path / "bad.jsonl"))
    with pytest.raises(UserError, match=r"problems\.jsonl:12 holds no problem .*data\.on_bad_row=skip"):
        traces.sample(*teacher, asked, progress=False)
    skipping = replace(asked, data=replace(asked.data, on_bad_row="skip"))
    told = traces.sample(*teacher, changed(skipping, max_new_tokens=1, path=None), progress=False)
    assert told.ended["skipped_no_problem"] == 2


def test_a_problem_longer_than_the_model_is_a_bad_row_and_a_skipped_one_does_not_shift_a_resume(
    teacher, config, tmp_path
):
    rows = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    rows.insert(1, {"problem": "Add " + "1 + " * 600 + "1."})
    (tmp_path / "problems.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    asked = changed(config, problems=3, samples=1, max_new_tokens=8)
    with pytest.raises(
        UserError, match=r"problems\.jsonl:2: the problem has \d+ tokens, the model 512 posit"
    ):
        traces.sample(*teacher, asked, progress=False)
    skipping = replace(asked, data=replace(asked.data, on_bad_row="skip"))
    told = traces.sample(*teacher, changed(skipping, problems=2), progress=False)
    assert told.ended["skipped_longer_than_the_model"] == 1
    told = traces.sample(*teacher, skipping, progress=False)
    assert (told.reused, told.ended["skipped_longer_than_the_model"]) == (2, 1)
    lines = traces.journal_of(told.path).read_text().splitlines()[1:]
    assert [json.loads(line)["problem"] for line in lines] == [
        rows[0]["problem"],
        rows[2]["messages"][0]["content"],
        rows[4]["problem"],
    ]


def test_the_command(tmp_path, capsys):
    words = [
        "model=tiny_llama",
        "data.traces.problems=2",
        "data.traces.max_new_tokens=5",
        "data.traces.slots=2",
    ]
    assert main(["data", "traces", *words, f"run_dir={tmp_path}", "data.max_document_tokens=400"]) == 0
    assert (
        f"{tmp_path}/traces.jsonl: 1 finished traces of tiny-llama (end 1, length 1;"
        in capsys.readouterr().out
    )
    assert main(["data", "traces", *words, f"run_dir={tmp_path}", "data.traces.top_p=2"]) == 2
    assert "data.traces.top_p=2.0: must be in (0, 1]" in capsys.readouterr().err
    cut = ["data.traces.max_new_tokens=1", "data.traces.temperature=0", f"run_dir={tmp_path}/cut"]
    assert main(["data", "traces", *words, *cut, "data.max_document_tokens=400"]) == 0
    assert "none ended by itself" in capsys.readouterr().out
