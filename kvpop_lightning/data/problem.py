"""A problem with a worked solution in which every stated fact and every use of it is located in the text.

`Script` is the pen that families write with. A family never formats a number by hand: `draw` and `derive`
record a value, `fact` writes it down for the first time, `use` writes it again where the solution looks it
up, and `equation` evaluates the very text that it prints. So a wrong step cannot be written, and the distance
from a fact to its uses (docs/data.md) is known for every document.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

# Private-use characters delimit marked text while a family writes; none of them survives in the finished
# problem.
_OPEN, _MIDDLE, _CLOSE = "\ue000", "\ue001", "\ue002"
_MARK = re.compile(f"{_OPEN}([fu])([^{_MIDDLE}]*){_MIDDLE}([^{_CLOSE}]*){_CLOSE}")

_OPERATORS: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    ast.USub: operator.neg,
}


@dataclass(frozen=True)
class Span:
    """Characters `start:end` of the question or of the solution."""

    part: str
    start: int
    end: int


@dataclass(frozen=True)
class Fact:
    """A value that is written once and looked up later.

    `given` facts are data of the problem (drawn, `alternative` is another admissible value); the others are
    results of earlier steps. `uses` are the later places that repeat the value because the solution needs it
    there.
    """

    name: str
    value: Any
    given: bool
    alternative: Any
    stated: Span
    uses: tuple[Span, ...]


@dataclass(frozen=True)
class Problem:
    """Question, worked solution, final answer and the facts with the places where they are used."""

    family: str
    question: str
    solution: str
    answer: str
    facts: tuple[Fact, ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The problem as a chat: the question from the user, the worked solution from the assistant."""
        return [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.solution}]

    def text(self, span: Span) -> str:
        """The characters that a span covers."""
        return (self.question if span.part == "question" else self.solution)[span.start : span.end]


def plain(text: str) -> str:
    """`text` without marks."""
    return _MARK.sub(lambda m: m.group(3), text) if _OPEN in text else text


def evaluate(expression: str) -> int:
    """Value of a printed integer expression with + - × ÷ mod and parentheses (÷ must divide exactly).

    Raises:
        ValueError: the text is not such an expression.
    """
    return _evaluate(plain(expression))


@lru_cache(maxsize=4096)
def _evaluate(expression: str) -> int:
    text = expression.replace("×", "*").replace("÷", "//").replace("−", "-").replace(" mod ", " % ")
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, KeyError) as error:
        raise ValueError(f"not an arithmetic expression: {expression!r}") from error


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.FloorDiv) and left % right:
            raise ValueError(f"{left} is not divisible by {right}")
        return _OPERATORS[type(node.op)](left, right)
    raise KeyError(type(node))


@dataclass
class Script:
    """Collects question and solution; see the module's docstring.

    `overrides` replaces the drawn value of given facts by name and leaves the random stream untouched, so
    that the same seed writes the same problem with one fact changed.
    """

    family: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._alternative: dict[str, Any] = {}
        self._parts: dict[str, list[str]] = {"question": [], "solution": []}
        self._answer: str | None = None

    def draw(self, name: str, rng: random.Random, options: Sequence[Any], *, alternative: Any = None) -> Any:
        """Draws a given fact from `options`; `alternative` defaults to the option after the drawn one."""
        index = rng.randrange(len(options))
        self._alternative[name] = options[(index + 1) % len(options)] if alternative is None else alternative
        return self._set(name, self.overrides.get(name, options[index]))

    def derive(self, name: str, value: Any) -> Any:
        """Records the result of a step under a name, to be written by `fact` and used later."""
        return self._set(name, value)

    def _set(self, name: str, value: Any) -> Any:
        assert name not in self.values, f"fact {name} recorded twice"
        self.values[name] = value
        return value

    def fact(self, name: str) -> str:
        """The text of a fact at the place that states it."""
        return f"{_OPEN}f{name}{_MIDDLE}{self.values[name]}{_CLOSE}"

    def use(self, name: str) -> str:
        """The text of a fact at a place that looks it up."""
        return f"{_OPEN}u{name}{_MIDDLE}{self.values[name]}{_CLOSE}"

    def equation(self, expression: str, name: str | None = None) -> str:
        """`expression = value`, computed from the printed expression itself and stated as fact `name`."""
        value = evaluate(expression)
        if name is None:
            return f"{expression} = {value}"
        self.derive(name, value)
        return f"{expression} = {self.fact(name)}"

    def ask(self, text: str) -> None:
        self._parts["question"].append(text)

    def say(self, text: str) -> None:
        self._parts["solution"].append(text)

    def conclude(self, answer: Any, expected: Any) -> None:
        """Sets the answer reached by the steps; `expected` is the same from a direct computation."""
        assert answer == expected, (
            f"{self.family}: the steps give {answer}, the direct computation {expected}"
        )
        self._answer = str(answer)

    def finish(self, between: tuple[str, str] = (" ", "\n")) -> Problem:
        """Strips the marks and turns them into spans. `between` joins the pieces of question and solution."""
        assert self._answer is not None, f"{self.family} gave no answer"
        stated: dict[str, Span] = {}
        uses: dict[str, list[Span]] = {}
        texts: dict[str, str] = {}
        for part, joiner in zip(("question", "solution"), between, strict=True):
            pieces: list[str] = []
            length = cursor = 0
            source = joiner.join(self._parts[part])
            for mark in _MARK.finditer(source):
                before, shown = source[cursor : mark.start()], mark.group(3)
                length += len(before)
                span = Span(part, length, length + len(shown))
                pieces += (before, shown)
                length += len(shown)
                cursor = mark.end()
                if mark.group(1) == "f":
                    assert mark.group(2) not in stated, f"fact {mark.group(2)} stated twice"
                    stated[mark.group(2)] = span
                else:
                    uses.setdefault(mark.group(2), []).append(span)
            texts[part] = "".join(pieces) + source[cursor:]
        assert uses.keys() <= stated.keys(), f"used but never stated: {sorted(uses.keys() - stated.keys())}"
        facts = tuple(
            Fact(
                name=name,
                value=self.values[name],
                given=name in self._alternative,
                alternative=self._alternative.get(name),
                stated=span,
                uses=tuple(uses.get(name, ())),
            )
            for name, span in stated.items()
        )
        return Problem(self.family, texts["question"], texts["solution"], self._answer, facts)
