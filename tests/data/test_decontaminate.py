from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvpop_lightning.data.decontaminate import Overlaps, words_of
from kvpop_lightning.data.documents import Document
from kvpop_lightning.data.prepare import load_rows, prepare
from kvpop_lightning.errors import UserError

SUITE = "Let $n$ be the smallest prime larger than 100; find the remainder of n squared divided by seven."


def document(text, answer="So it is 5."):
    talk = ({"role": "user", "content": text}, {"role": "assistant", "content": answer})
    return Document(talk, "here:1", "f")


def naive(words, suite, n):
    """The definition, word by word."""
    return any(
        words[i : i + n] == suite[j : j + n]
        for i in range(len(words) - n + 1)
        for j in range(len(suite) - n + 1)
    )


@pytest.mark.parametrize("n", [2, 8, 13])
def test_equals_the_definition(n):
    suite, overlaps = words_of(SUITE), Overlaps([("s", SUITE)], n)
    for start in range(len(suite)):
        for length in (1, n - 1, n, n + 3):
            text = "alpha beta " + " ".join(suite[start : start + length]) + " gamma"
            assert (overlaps.first(document(text)) is not None) == naive(words_of(text), suite, n)


def test_spelling_does_not_hide_a_copy_and_the_answer_is_searched_too():
    overlaps = Overlaps([("suite:3", SUITE)], 13)
    disguised = SUITE.upper().replace(" ", "  ").replace("100;", "\\(100\\), and")
    assert overlaps.first(document(SUITE.upper().replace("$", "")))
    assert not overlaps.first(document(disguised.replace("PRIME", "number")))
    found = overlaps.first(document("What is it?", "We are asked: " + SUITE))
    assert found.suite == "suite:3"
    assert found.document == "here:1"
    assert len(found.words.split()) == 13


def test_short_problems_must_occur_whole_and_tiny_ones_are_not_looked_for():
    overlaps = Overlaps([("a", "Factor x squared minus nine"), ("b", "Solve it")], 13)
    assert overlaps.first(document("Please factor x squared minus nine now."))
    assert not overlaps.first(document("Please factor x squared minus ten now. Solve it."))
    assert (overlaps.problems, overlaps.too_short) == (2, 1)


@pytest.fixture
def files(config, tmp_path):
    lines = [{"problem": f"Add {i} to {i + 1} please.", "solution": f"It is {2 * i + 1}."} for i in range(40)]
    lines[7]["problem"] = "Homework: " + SUITE
    lines[9]["solution"] = SUITE + " Five."
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "suite.jsonl").write_text(json.dumps({"question": SUITE}) + "\n")
    return replace(
        config, source="jsonl", path=str(tmp_path / "a.jsonl"), suites=[str(tmp_path / "suite.jsonl")],
        train_rows=99, eval_share=0.0,
    )  # fmt: skip


def test_removed_by_default_listed_and_counted(files, tokenizer):
    index = load_rows(prepare(files, tokenizer, splits=("train",)), "train").index
    assert index["account"]["dropped"] == {"contaminated": 2}
    assert [(o["document"], o["suite"]) for o in index["overlaps"]] == [
        ("a.jsonl:8", "suite.jsonl:1"),
        ("a.jsonl:10", "suite.jsonl:1"),
    ]
    index = load_rows(
        prepare(replace(files, decontaminate="report"), tokenizer, splits=("train",)), "train"
    ).index
    assert (index["account"]["kept"], index["counts"]["overlaps_suites"], len(index["overlaps"])) == (
        40,
        2,
        2,
    )
    index = load_rows(
        prepare(replace(files, decontaminate="off"), tokenizer, splits=("train",)), "train"
    ).index
    assert (index["account"]["kept"], index["overlaps"]) == (40, [])


def test_a_suite_without_problems_is_named(files, tokenizer, tmp_path):
    (tmp_path / "suite.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match=r"data\.suites: .*suite\.jsonl:1 holds no problem"):
        prepare(files, tokenizer, splits=("train",))
