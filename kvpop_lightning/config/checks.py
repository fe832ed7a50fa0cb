"""What a configuration must satisfy beyond its types: all problems are collected, each as one line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from kvpop_lightning.config.bounds import BOUNDS
from kvpop_lightning.config.choices import (
    CHOICES,
    DECAY_SUFFIX,
    SCORER_OF_TRAINED_POLICY,
    did_you_mean,
)
from kvpop_lightning.config.describe import settings
from kvpop_lightning.config.memory import mlstm_cost_in_keys
from kvpop_lightning.config.schema import Config

WITHOUT_EVALUATION = ("data", "prepare", "generate", "chat", "export", "bench", "doctor", "ui", "runs")
"""Commands that never evaluate: `eval.*` need not fit the budget there."""


NOT_OPTIONS = {
    **{n: f"set policy.{n}" for n in ("name", "budget", "decay", "decay_step", "decay_depth", "decay_heads")},
    **{n: f"set policy.scorer.{n}" for n in ("inputs", "delay", "width", "memory_dim", "value_dim")},
    **{n: f"set model.{n}" for n in ("attention_backend", "target_backend")},
    **dict.fromkeys(("num_layers", "num_heads", "head_dim", "hidden_size", "model"), "the model says it"),
    **dict.fromkeys(("seed", "generator"), "set seed"), **dict.fromkeys(("policy", "scorer"), "set policy"),
    "match_bytes": "set policy.equal_bytes", "gate_width": "set policy.gate.width",
    "gate_source": "set policy.gate.source",
}  # fmt: skip
"""Arguments of `retrofit` and `build_policy` that have keys of their own, and which."""


def problems_of(config: Config, command: str | None = None) -> list[str]:
    """One line per problem, empty when all is well; `command` leaves out what does not concern it."""
    alone = [*_choices(config), *_bounds(config)]
    wrong = {problem.split("=", 1)[0] for problem in alone}
    found = list(alone)
    for check, keys in _CROSS_CHECKS:
        if command in WITHOUT_EVALUATION and any(key.startswith("eval.") for key in keys):
            continue
        if not wrong & set(keys):  # a wrong key is reported once, not again through what follows from it
            found += check(config)
    return found


def value_at(config: Config, key: str) -> Any:
    """The value under a dotted key."""
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def _choices(config: Config) -> Iterator[str]:
    own = ("policy.name", "policy.scorer.type", "eval.policies") if config.policy.module else ()
    for key, allowed in CHOICES.items():
        if key in own:  # names that only the registry knows, once the file is imported
            continue
        value = value_at(config, key)
        for name in value if isinstance(value, list) else [value]:
            if name is not None and name not in allowed:
                yield f"{key}={name}: no such choice{did_you_mean(name, allowed) or '; --help lists them'}"


def _bounds(config: Config) -> Iterator[str]:
    for key, setting in settings().items():
        value = value_at(config, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        bounds = BOUNDS.get(key)
        if not math.isfinite(value):
            yield f"{key}={value}: must be a finite number"
        elif bounds is not None and not bounds.holds(value):
            hint = f" ({bounds.hint})" if bounds.hint else f" (default {setting.default})"
            yield f"{key}={value}: must be {bounds.text()}{hint}"


def _budgets(config: Config) -> Iterator[str]:
    protected = config.policy.budget.sink + config.policy.budget.window
    budgets = config.eval.budgets
    if not budgets:
        yield "eval.budgets=[]: name at least one budget, as in eval.budgets=[256,128]"
    small = [budget for budget in budgets if budget <= protected]
    if small:
        yield (
            f"eval.budgets={budgets}: {', '.join(map(str, small))} is too small, no long-range slot is "
            f"left after policy.budget.sink {config.policy.budget.sink} + policy.budget.window "
            f"{config.policy.budget.window} = {protected}: lower the window or raise the budget to at "
            f"least {protected + 1}"
        )


def _gate(config: Config) -> Iterator[str]:
    if config.policy.name == "retention_gate" and config.policy.gate.source != "hidden":
        yield (
            f"policy.gate.source={config.policy.gate.source}: retention_gate reads the hidden state; only "
            "dms and dmc borrow a channel"
        )


def _stop(config: Config) -> Iterator[str]:
    if not all(config.generate.stop):
        yield f"generate.stop={config.generate.stop}: an empty text would end at once; leave it out"


def _options(config: Config) -> Iterator[str]:
    for name in config.policy.options:
        if name in NOT_OPTIONS:
            yield f"policy.options.{name}: no option of a policy; {NOT_OPTIONS[name]}"
        elif not str(name).isidentifier():
            yield f"policy.options.{name}: not a name, write policy.options.NAME=value"


def _mlstm_memory(config: Config) -> Iterator[str]:
    """The state must leave at least one long-range key (METHOD.md, section 5); without a known head size:
    checked later."""
    if config.policy.name == "kvpop_mlstm" or "kvpop_mlstm" in config.train_policies:
        topk = config.policy.budget.topk
        yield from _mlstm_fits(config, topk, f"policy.budget.topk={topk}", "raise policy.budget.topk")


def _mlstm_eval_memory(config: Config) -> Iterator[str]:
    protected = config.policy.budget.sink + config.policy.budget.window
    if "kvpop_mlstm" in config.eval.policies:
        for budget in config.eval.budgets:
            if budget > protected:
                label = f"eval.budgets={budget} (topk {budget - protected})"
                yield from _mlstm_fits(config, budget - protected, label, "raise it")


def _mlstm_fits(config: Config, topk: int, label: str, mend: str) -> Iterator[str]:
    cost = mlstm_cost_in_keys(config) if config.policy.equal_bytes else None
    if cost is not None and topk - cost < 1:
        yield (
            f"{label}: the mlstm state costs as many bytes as {cost} keys and leaves {topk - cost}: "
            f"{mend}, lower policy.scorer.memory_dim or policy.scorer.value_dim, or set "
            "policy.equal_bytes=false"
        )


def _delay(config: Config) -> Iterator[str]:
    delay, window = config.policy.scorer.delay, config.policy.budget.window
    if delay is not None and delay > window:
        yield (
            f"policy.scorer.delay={delay}: must not exceed policy.budget.window {window}: a token is "
            "scored when it leaves the window"
        )


def _names(config: Config) -> Iterator[str]:
    name, scorer = config.policy.name, config.policy.scorer.type
    implied = SCORER_OF_TRAINED_POLICY.get(name, name.removesuffix(DECAY_SUFFIX))
    if name in SCORER_OF_TRAINED_POLICY and scorer != implied:
        other = next((known for known, kind in SCORER_OF_TRAINED_POLICY.items() if kind == scorer), None)
        yield (
            f"policy.scorer.type={scorer}: policy.name={name} has the scorer {implied}: choose both "
            f"together with policy={name}{f' or policy={other}' if other else ''}"
        )


def _duplicates(config: Config) -> Iterator[str]:
    for key in ("eval.policies", "eval.budgets", "train_policies"):
        values = value_at(config, key)
        twice = sorted({str(value) for value in values if values.count(value) > 1})
        if twice:
            yield f"{key}={values}: {', '.join(twice)} is listed twice"


def _target(config: Config) -> Iterator[str]:
    target, base = config.distill.target, config.trainer.base
    if base == "frozen" and target.source == "student":
        yield (
            "distill.target.source=student: with trainer.base=frozen the targets are computed once from "
            "the dense teacher: use distill.target.source=teacher or trainer.base=full"
        )
    elif target.normalizer == "sparse" and (target.source == "teacher" or base == "frozen"):
        yield (
            "distill.target.normalizer=sparse: needs the student's own attention "
            "(distill.target.source=student and trainer.base=full): use distill.target.normalizer=dense"
        )


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.source in ("jsonl", "parquet") and not data.path:
        yield (
            f"data.path=null: data.source={data.source} needs a file or glob in data.path; "
            "data=teacher_traces takes the file that kvpop data traces wrote"
        )
    if data.source == "procedural" and data.path:
        yield (
            f"data.path={data.path}: data.source=procedural makes its own problems and reads no file: say "
            "data=jsonl, data=parquet or data=hub"
        )
    if data.train_rows is None and (data.source == "procedural" or data.streaming):
        what = "problems of data.source=procedural" if data.source == "procedural" else "streamed rows"
        yield f"data.train_rows=null: {what} never end: give a number"
    if data.min_document_tokens > data.max_document_tokens:
        yield (
            f"data.min_document_tokens={data.min_document_tokens}: must not exceed data.max_document_tokens "
            f"{data.max_document_tokens}"
        )


def _rows(config: Config) -> Iterator[str]:
    if config.eval.rows > config.data.eval_rows:
        yield (
            f"eval.rows={config.eval.rows}: only data.eval_rows {config.data.eval_rows} are prepared: "
            "raise data.eval_rows or lower eval.rows"
        )


def _model(config: Config) -> Iterator[str]:
    if config.model.source in ("hub", "path") and not config.model.path:
        what = "the hub id" if config.model.source == "hub" else "the folder of the checkpoint"
        yield f"model.path=null: model.source={config.model.source} needs {what} in model.path"


def _tracking(config: Config) -> Iterator[str]:
    uri = config.tracking.uri
    if uri is not None and ("://" not in uri or uri.startswith("file:")):
        yield (
            f"tracking.uri={uri}: MLflow no longer writes file stores: use "
            f"sqlite:///{uri.removeprefix('file:').strip('/')}.db, a server's http(s) address, or null "
            "for the project's own database"
        )


_CROSS_CHECKS: tuple[tuple[Callable[[Config], Iterator[str]], tuple[str, ...]], ...] = (
    (_budgets, ("eval.budgets", "policy.budget.sink", "policy.budget.window", "policy.budget.topk")),
    (
        _mlstm_memory,
        ("policy.budget.topk", "policy.scorer.memory_dim", "policy.scorer.value_dim", "policy.name"),
    ),
    (
        _mlstm_eval_memory,
        (
            "eval.budgets",
            "eval.policies",
            "policy.budget.sink",
            "policy.budget.window",
            "policy.scorer.memory_dim",
            "policy.scorer.value_dim",
            "policy.budget.topk",
        ),
    ),
    (_options, ("policy.options",)),
    (_stop, ("generate.stop",)),
    (_gate, ("policy.name", "policy.gate.source")),
    (_delay, ("policy.scorer.delay", "policy.budget.window")),
    (_names, ("policy.name", "policy.scorer.type")),
    (_duplicates, ("eval.policies", "eval.budgets", "train_policies")),
    (_target, ("distill.target.source", "distill.target.normalizer", "trainer.base")),
    (_data, ("data.source", "data.min_document_tokens", "data.max_document_tokens")),
    (_rows, ("eval.rows", "data.eval_rows")),
    (_model, ("model.source",)),
    (_tracking, ("tracking.uri",)),
)
"""Checks over several keys, and the keys they read: a check is left out when one of them is already wrong."""
