from __future__ import annotations

import re

import numpy as np
import pytest

from kvpop_lightning.data import families
from kvpop_lightning.data.chat import ChatRenderer
from kvpop_lightning.data.distances import fact_distances
from kvpop_lightning.data.sample import least_tokens
from kvpop_lightning.errors import UserError

NAMES = families.available()
_CHAIN = re.compile(r"(?<![\w.])\(?-?\d+(?: ?\+ \d+\))?(?: (?:[+\-×÷]|mod) -?\d+)+ = -?\d+")


def length(problem):
    return least_tokens(problem.question + problem.solution)


def recompute(expression: str) -> int:
    """An evaluator of its own, by precedence on the token list (not the one that wrote the text)."""
    expression = re.sub(r"\((\d+) \+ (\d+)\)", lambda m: str(int(m[1]) + int(m[2])), expression)
    tokens = expression.split()
    for operators in ("×÷m", "+-"):
        rest = [tokens[0]]
        for sign, number in zip(tokens[1::2], tokens[2::2], strict=True):
            if sign[0] not in operators:
                rest += [sign, number]
                continue
            a, b = int(rest[-1]), int(number)
            whole, modulo = (a // b, a % b) if b else (0, 0)
            rest[-1] = str({"×": a * b, "÷": whole, "m": modulo, "+": a + b, "-": a - b}[sign[0]])
        tokens = rest
    return int(tokens[0])


def test_enough_families_and_some_held_out():
    assert len(families.available(held_out=False)) >= 8
    assert len(families.available(held_out=True)) >= 3
    assert not set(families.available(held_out=True)) & set(families.available(held_out=False))
    with pytest.raises(UserError, match=r"unknown problem family 'ledgers'; known: .*ledger"):
        families.get("ledgers")


@pytest.mark.parametrize("name", NAMES)
def test_reproducible_from_the_seed(name):
    first, again, other = (families.generate(name, seed, 6) for seed in (5, 5, 6))
    assert first == again
    assert first.question != other.question


@pytest.mark.parametrize("name", NAMES)
def test_every_equation_in_the_text_holds(name):
    checked = 0
    for seed in range(6):
        problem = families.generate(name, seed, 5 + 3 * seed)
        for equation in _CHAIN.findall(problem.solution):
            left, right = equation.rsplit(" = ", 1)
            assert recompute(left) == int(right), equation
            checked += 1
        assert problem.answer in problem.solution.splitlines()[-1] or all(
            part in problem.solution.splitlines()[-1] for part in problem.answer.split(" remainder ")
        )
    assert checked >= 30


@pytest.mark.parametrize("name", NAMES)
def test_spans_cover_the_values(name):
    problem = families.generate(name, 1, 12)
    assert sum(fact.given for fact in problem.facts) >= 5
    for fact in problem.facts:
        assert problem.text(fact.stated) == str(fact.value)
        for use in fact.uses:
            assert problem.text(use) == str(fact.value)
            assert (use.part, use.start) > (fact.stated.part, fact.stated.start)
    assert not re.search("[\ue000-\ue0ff{}]", problem.question + problem.solution)


@pytest.mark.parametrize("name", NAMES)
def test_changing_an_early_fact_changes_the_answer(name):
    """Only the changed value moves in the question, and the answer depends on it."""
    changed = tried = 0
    for seed in range(4):
        before = families.generate(name, seed, 14)
        given = [fact for fact in before.facts if fact.given and fact.stated.part == "question" and fact.uses]
        assert given, "no fact of the question is used"
        assert max(fact.stated.end for fact in given) <= len(before.question)
        for fact in given[:8]:
            after = families.generate(name, seed, 14, overrides={fact.name: fact.alternative})
            start, end = fact.stated.start, fact.stated.end
            expected = before.question[:start] + str(fact.alternative) + before.question[end:]
            assert after.question == expected
            assert after.solution != before.solution
            tried += 1
            changed += after.answer != before.answer
    assert changed >= 0.9 * tried, f"{changed} of {tried}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [150, 1024, 3000])
def test_a_length_can_be_asked_for(name, tokens):
    for seed in range(4):
        problem = families.problem_of_length(name, seed, tokens, length)
        assert tokens <= length(problem) <= 1.15 * tokens + 240


@pytest.mark.parametrize("name", NAMES)
def test_solutions_reach_far_back(name, tokenizer):
    """docs/data.md: median distance at least 300 tokens, a tenth at least 1000 (SmolLM2: docs/data.md)."""
    renderer = ChatRenderer(tokenizer)
    distances = []
    for seed, tokens in enumerate((300, 700, 1500, 2500, 4000)):
        problem = families.problem_of_length(name, seed, tokens, lambda p: least_tokens(p.solution))
        distances += [reach.distance for reach in fact_distances(problem, renderer) if reach.given]
    assert np.median(distances) >= 300
    assert np.mean(np.array(distances) >= 1000) >= 0.1


def test_documents_differ_in_wording():
    openings = {
        re.sub(r"[\d]+", "#", families.generate("ledger", seed, 4).solution)[-160:] for seed in range(12)
    }
    assert len(openings) >= 8


def test_bad_arguments():
    with pytest.raises(ValueError, match="size"):
        families.generate("ledger", 0, 0)
    with pytest.raises(ValueError, match="level"):
        families.generate("ledger", 0, 3, level=4)
