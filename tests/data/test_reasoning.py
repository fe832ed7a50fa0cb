from __future__ import annotations

from kvpop_lightning.data.reasoning import TASKS, short_problem


def test_short_problems_are_reproducible_varied_and_end_in_the_answer():
    problems = [short_problem(seed) for seed in range(80)]
    assert problems[:10] == [short_problem(seed) for seed in range(10)]
    assert len({problem.family for problem in problems}) >= len(TASKS) - 4
    assert all(problem.solution.endswith(f"The answer is {problem.answer}.") for problem in problems)
    worked = [p for p in problems if p.family.endswith(("/gcd", "/lcm", "/products"))]
    assert worked
    assert all(len(p.solution) > len(p.answer) + 30 for p in worked)
    assert not any("Give only" in problem.question for problem in problems)
