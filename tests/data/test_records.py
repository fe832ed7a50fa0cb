from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvpop_lightning.config.schema import DataConfig
from kvpop_lightning.data.conversation import BadRowError, messages_of
from kvpop_lightning.data.document_blocks import DocumentBlocks
from kvpop_lightning.data.documents import Document
from kvpop_lightning.data.records import count_rows, find_files, parse_line, read_rows
from kvpop_lightning.errors import UserError

GOOD = {
    "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4, naïve 数 🙂"}]
}
PAIR = {"problem": "1 + 1?", "solution": "2"}


def read_documents(files, kind, on_bad_row, counts):
    config = DataConfig(source=kind, on_bad_row=on_bad_row, eval_share=0.0)
    source = SimpleNamespace(rows=lambda: read_rows(files, kind))
    for _, window in DocumentBlocks(config, None, "train", source).tasks(0):
        counts.update(window.counts)
        yield from window.documents


def write(path, rows):
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return path


def test_jsonl_both_layouts_and_non_ascii(tmp_path):
    file = write(tmp_path / "a.jsonl", [GOOD, b"", {**PAIR, "metadata": None, "messages": None}])
    documents = list(read_documents([file], "jsonl", "error", Counter()))
    assert [d.origin for d in documents] == ["a.jsonl:1", "a.jsonl:3"]
    assert documents[0].messages[1]["content"] == "4, naïve 数 🙂"
    assert [m["role"] for m in documents[1].messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("row", "reason", "words"),
    [
        ({"problem": "x"}, "missing_field", "missing field 'solution'"),
        ({"question": "x", "y": 1}, "missing_field", "missing field 'problem'.*this one has question, y"),
        ({"messages": []}, "empty_messages", "`messages` is empty"),
        ({"messages": "hello"}, "wrong_type", "`messages` is of type str"),
        ({"messages": [{"role": "user"}]}, "missing_field", r"messages\[0\] needs"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown_role", "role 'robot'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no_assistant", "no message of the assistant"),
        ({"problem": 3, "solution": "x"}, "wrong_type", "problem is of type int"),
        ({"problem": "x", "solution": "  "}, "empty_text", "solution is empty"),
        ({"problem": "x\ud800", "solution": "y"}, "not_unicode", "surrogate"),
        ([1, 2], "not_an_object", "list"),
        (b"{not json", "not_json", "not JSON"),
        (b'{"problem": "\xff"}', "not_utf8", "not UTF-8 at byte"),
    ],
)
def test_a_bad_row_is_named_or_skipped_and_counted(tmp_path, row, reason, words):
    file = write(tmp_path / "bad.jsonl", [GOOD, row, PAIR])
    with pytest.raises(UserError, match=rf"bad\.jsonl:2: .*{words}.*data\.on_bad_row=skip"):
        list(read_documents([file], "jsonl", "error", Counter()))
    counts: Counter[str] = Counter()
    assert len(list(read_documents([file], "jsonl", "skip", counts))) == 2
    assert counts == {"rows": 3, f"bad_row_{reason}": 1, "kept": 2}


def test_parquet(tmp_path):
    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    table = pa.table({"messages": pa.array([GOOD["messages"], []], messages), "extra": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(pa.table({"problem": ["p"], "solution": ["s"]}), tmp_path / "b.parquet")
    files = find_files(str(tmp_path / "*.parquet"), "data.path")
    with pytest.raises(UserError, match=r"a\.parquet row 2: `messages` is empty"):
        list(read_documents(files, "parquet", "error", Counter()))
    documents = list(read_documents(files, "parquet", "skip", Counter()))
    assert [d.origin for d in documents] == ["a.parquet:1", "b.parquet:1"]
    assert list(documents[0].messages) == GOOD["messages"]
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(UserError, match=r"c\.parquet row 1: missing field `messages`.*its columns are text"):
        list(read_documents([tmp_path / "c.parquet"], "parquet", "skip", Counter()))


@pytest.mark.parametrize("stream", [False, True])
def test_arrow_files_of_both_formats(tmp_path, stream):
    table = pa.table({"messages": pa.array([GOOD["messages"]] * 700), "answer": ["4"] * 700})
    writer = (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(tmp_path / "a.arrow"), table.schema)
    writer.write_table(table, max_chunksize=300)
    writer.close()
    rows = list(read_rows([tmp_path / "a.arrow"]))
    assert [row.origin for row in rows] == [f"a.arrow:{i}" for i in range(1, 701)]
    assert rows[-1].record == {"messages": GOOD["messages"], "answer": "4"}
    whole = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "cut.arrow").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cut\.arrow is not a readable Arrow file"):
        list(read_rows([tmp_path / "cut.arrow"]))


def test_reasoning_calls_and_sharegpt():
    rows = messages_of(
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a", "reasoning_content": " think \n"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "py", "arguments": "{}"}}],
                },
            ]
        }
    )
    assert rows[1]["content"] == "<think>\nthink\n</think>\n\na"
    assert rows[2]["content"] == '\n<tool_call>\n{"name": "py", "arguments": "{}"}\n</tool_call>'
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert [m["role"] for m in messages_of({"conversations": talk})] == ["user", "assistant"]


def test_unreadable_files(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    write(tmp_path / "blank.jsonl", [b"", b"  "])
    (tmp_path / "no.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match=r"data\.path is not set"):
        find_files(None, "data.path")
    with pytest.raises(UserError, match=r"data\.path: no file matches '.*absent"):
        find_files(str(tmp_path / "absent*.jsonl"), "data.path")
    with pytest.raises(UserError, match=r"takes one path or glob, not a list"):
        find_files("[a.jsonl,b.jsonl]", "data.path")
    with pytest.raises(UserError, match=r"empty\.jsonl is empty"):
        find_files(str(tmp_path / "empty.jsonl"), "data.path")
    with pytest.raises(UserError, match="is not a file"):
        find_files(str(tmp_path), "data.path")
    with pytest.raises(UserError, match=r"blank\.jsonl holds no rows"):
        list(read_documents([tmp_path / "blank.jsonl"], "jsonl", "skip", Counter()))
    with pytest.raises(UserError, match=r"no\.parquet is not a readable Parquet file"):
        list(read_documents([tmp_path / "no.parquet"], "parquet", "error", Counter()))


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"PAR1\xff\xff", "jsonl", "not UTF-8 at byte 4; it looks like Parquet: data=parquet"),
        (b"\x1f\x8b\x08\xff", "jsonl", "not UTF-8 at byte 1; it is compressed with gzip: unpack it first"),
        (b'[\n {"problem": "a"}\n]', "jsonl", "it looks like one JSON array: write one object a line"),
        (b'[{"problem": "a", "solution": "b"}]', "jsonl", "not an object; it looks like one JSON array"),
        (b'{"problem": "a", "solution": "b"}', "parquet", "it looks like JSON lines: data=jsonl"),
        (b"PAR1 cut off", "parquet", "is not a readable Parquet file: [^;]*$"),
        (b"PAR1 cut off", "arrow", "is not a readable Arrow file.*; it looks like Parquet: data=parquet"),
        (b"ARROW1\0\0", "parquet", "it looks like Arrow: data=arrow"),
    ],
)
def test_a_file_of_another_kind_says_what_it_seems_to_be(tmp_path, content, kind, words):
    (tmp_path / "file").write_bytes(content + b"\n")
    with pytest.raises(UserError, match=words):
        list(read_documents([tmp_path / "file"], kind, "error", Counter()))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_rows_are_counted_without_being_read(tmp_path, kind):
    files = [tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"]
    for file, number in zip(files, (700, 5), strict=True):
        table = pa.table({"problem": ["p"] * number, "solution": ["s"] * number})
        if kind == "jsonl":
            write(file, table.to_pylist())
        elif kind == "parquet":
            pq.write_table(table, file)
        else:
            with pa.ipc.new_stream(str(file), table.schema) as writer:
                writer.write_table(table, max_chunksize=300)
    assert count_rows(files, kind) == 705 == len(list(read_rows(files, kind)))


def test_documents_are_split_by_the_problem():
    def document(problem, solution):
        return Document(tuple(messages_of({"problem": problem, "solution": solution})), "o", "f")

    a, b = document("What is  1 + 1?", "2"), document("What is 1 + 1?\n", "The answer is 2.")
    assert a.problem_hash == b.problem_hash
    assert a.hash != b.hash
    shares = [document(f"problem {i}", "s").in_share(0.1) for i in range(2000)]
    assert 0.07 < sum(shares) / len(shares) < 0.13
    assert not any(document(f"problem {i}", "s").in_share(0.0) for i in range(50))


def test_the_column_of_a_line_cut_off_is_its_end() -> None:
    error = parse_line('{"problem": "x", "solution": \n')
    assert isinstance(error, BadRowError)
    assert str(error).endswith("at column 29")
