from __future__ import annotations

import random

import pytest

from kvpop_lightning.data.problem import Script, evaluate, plain


@pytest.mark.parametrize(
    ("expression", "value"),
    [("3 + 4 × 5", 23), ("-7 mod 5", 3), ("84 ÷ 4", 21), ("(3 + 4) mod 5", 2), ("10 - 3 - 4", 3)],
)
def test_evaluate(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize("expression", ["85 ÷ 4", "3 +", "abs(3)", "2 ** 3", "1.5 + 1", "True + 1", "3 / 2"])
def test_evaluate_refuses_what_is_not_exact_integer_arithmetic(expression):
    with pytest.raises(ValueError):
        evaluate(expression)


def test_marks_become_spans():
    script = Script("test")
    script.draw("price", random.Random(0), [12])
    script.ask(f"Figs cost {script.fact('price')} each, ä é.")
    total = script.equation("3 × " + script.use("price"), "total")
    script.say(f"We pay {total}.")
    script.say(f"So {script.use('total')}.")
    script.conclude(script.values["total"], 36)
    problem = script.finish()
    assert problem.question == "Figs cost 12 each, ä é."
    assert problem.solution == "We pay 3 × 12 = 36.\nSo 36."
    assert plain(problem.solution) == problem.solution
    price, total = problem.facts
    assert (price.given, price.value, problem.text(price.stated)) == (True, 12, "12")
    assert [problem.text(use) for use in price.uses] == ["12"]
    assert (total.given, problem.text(total.stated)) == (False, "36")
    assert [(use.part, problem.text(use)) for use in total.uses] == [("solution", "36")]


def test_a_wrong_direct_computation_is_caught():
    with pytest.raises(AssertionError, match="direct computation"):
        Script("test").conclude(3, 4)


def test_a_fact_used_but_never_stated_is_caught():
    script = Script("test")
    script.derive("x", 1)
    script.say(script.use("x"))
    script.conclude(1, 1)
    with pytest.raises(AssertionError, match="never stated"):
        script.finish()
