"""From the schema, files and the command line to one frozen `Config`.

Precedence, weakest first: schema < group files < experiment body < configs/local.yaml < sweep point <
command line. `policy=kvpop_mlstm` chooses `configs/policy/kvpop_mlstm.yaml`, `policy.budget.topk=188`
sets a value. An experiment or local file chooses group files under its key `defaults`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, cast, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvpop_lightning.config import files
from kvpop_lightning.config.checks import problems_of
from kvpop_lightning.config.choices import did_you_mean, policies_of_words
from kvpop_lightning.config.describe import Setting, groups, settings, top_groups
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import ConfigError, UserError

SHORT = {"policies": "eval.policies"}
"""Keys that may be written without their group."""
FREE_TEXT = ("generate.prompt", "generate.system")
"""Keys whose `${...}` is text, not a reference to another key: they go past OmegaConf."""


OWN_KEYS = {name: name for name in ("generate", "sweep", "ablate", "export", "bench")} | {"chat": "generate"}
"""Commands that take the keys of a group without its name in front (`storage=...`), and the group."""


@dataclass(frozen=True)
class _Assignment:
    key: str
    value: Any
    source: str
    """What an error message starts with: a file name and colon, or nothing for the command line."""


def compose(
    command_line: Sequence[str] = (),
    *,
    command: str | None = None,
    default_experiment: str | None = None,
    sweep_point: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration that a command line asks for, checked and resolved.

    Args:
        command_line: `key=value` words.
        command: name of the command; those of OWN_KEYS take their keys without the group's name in front,
            and checks that do not concern a command are left out. None = every check.
        default_experiment: experiment when the command line names none (`kvpop demo`).
        sweep_point: values of one sweep trial by dotted key.

    Raises:
        ConfigError: everything that is wrong, each problem as one line.
    """
    problems: list[str] = []
    try:
        words = _split(command_line, command, problems)
        assignments, experiment = _gather(words, sweep_point or {}, default_experiment, problems)
    except UserError as error:
        raise ConfigError([*problems, str(error)]) from error
    tree = copy.deepcopy(_schema_tree())
    texts: dict[str, Any] = {}
    for item in assignments:
        if item.key in FREE_TEXT and (item.value is None or isinstance(item.value, str)):
            texts[item.key.rpartition(".")[2]] = item.value or None
        else:
            _apply(tree, item, problems)
    if problems:
        raise ConfigError(problems)
    try:
        config = cast(Config, OmegaConf.to_object(tree))  # resolves references too
    except OmegaConfBaseException as error:
        raise ConfigError([_first_line(error)]) from error
    config = replace(config, generate=replace(config.generate, **texts))
    config = replace(config, eval=replace(config.eval, policies=policies_of_words(config.eval.policies)))
    if experiment is not None:
        config = replace(config, experiment=experiment)
    keys = {key for key, _ in words}
    if keys & {"policy", "policy.name"}:
        config = _of_one_policy(config, command, keys)
    problems = problems_of(config, command)
    if problems:
        raise ConfigError(problems)
    return _resolved(config)


def _of_one_policy(config: Config, command: str | None, keys: set[str]) -> Config:
    """Who names one policy on the command line wants that one trained and measured, not only the lists of
    the experiment.
    """
    if "train_policies" not in keys:
        config = replace(config, train_policies=[])
    name = config.policy.name
    if "eval.policies" not in keys and command in ("evaluate", "compare"):
        beside = ["full"] if command == "evaluate" else config.eval.policies
        config = replace(config, eval=replace(config.eval, policies=list(dict.fromkeys([*beside, name]))))
    return config


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML; `experiment=FILE.yaml` composes it back to an equal one."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True, width=110)


def _resolved(config: Config) -> Config:
    """Fills the defaults that depend on other keys."""
    if config.distill.target.source is None:
        source = "teacher" if config.trainer.base == "frozen" else "student"
        target = replace(config.distill.target, source=source)
        config = replace(config, distill=replace(config.distill, target=target))
    return config


def _split(words: Sequence[str], command: str | None, problems: list[str]) -> list[tuple[str, str]]:
    pairs = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            shown = word if len(word) <= 60 else word[:57] + "..."
            known = [*settings(), *top_groups()]
            problems.append(f"'{shown}' is not key=value{_hint(did_you_mean(word, known))}")
        elif key.startswith("-"):
            problems.append(f"'{key}': keys take no dashes; write {key.lstrip('-')}={value}")
        else:
            own = f"{OWN_KEYS.get(command or '')}.{key.strip()}"
            name = own if own in settings() else key.strip()
            pairs.append((SHORT.get(name, name), value))
    return pairs


def _hint(text: str) -> str:
    return text if "did you mean" in text else ""


def _gather(
    words: list[tuple[str, str]],
    sweep_point: Mapping[str, Any],
    default_experiment: str | None,
    problems: list[str],
) -> tuple[list[_Assignment], str | None]:
    """All assignments in order of precedence, and the name of the experiment."""
    experiment = default_experiment
    for key, value in (*sweep_point.items(), *words):
        if key == "experiment":
            experiment = None if value in (None, "", "null") else str(value)
    choices: dict[str, tuple[str, str]] = {}  # group -> (file name, source)
    bodies: list[_Assignment] = []
    paths = [files.group_file("experiment", experiment)] if experiment else []
    if (local := files.local_file()) is not None:
        paths.append(local)
    for path in paths:
        source = f"{path}: "
        body = files.read_yaml(path)
        defaults = body.pop("defaults", None) or {}
        if not isinstance(defaults, dict):
            raise UserError(f"{source}defaults must map a group to a file name, as in `policy: kvpop_mlp`")
        choices |= {str(group): (str(name), source) for group, name in defaults.items()}
        bodies += _flatten(body, "", source)
    if experiment and experiment.endswith((".yaml", ".yml")):
        named = [item for item in bodies if item.key == "experiment" and item.source == f"{paths[0]}: "]
        experiment = named[0].value if named else experiment  # a saved configuration keeps its name
    bodies = [item for item in bodies if item.key != "experiment"]
    last: list[_Assignment] = []
    own = any(key == "policy.module" and value for key, value in (*sweep_point.items(), *words))
    own |= any(item.key == "policy.module" and item.value for item in bodies)
    for key, value in (*sweep_point.items(), *words):
        if key == "policy" and own and str(value) not in files.names(key):
            last.append(_Assignment("policy.name", value, ""))  # a policy of the user's own has no file
        elif key in top_groups():
            choices[key] = (str(value), "")
        elif key != "experiment":
            last.append(_Assignment(key, value, ""))
    chosen: list[_Assignment] = []
    for group, (name, source) in choices.items():
        if group not in top_groups():
            problems.append(f"{source}defaults: unknown group '{group}'{did_you_mean(group, top_groups())}")
            continue
        try:
            path = files.group_file(group, name)
            chosen += _flatten(files.read_yaml(path), f"{group}.", f"{path}: ")
        except UserError as error:
            problems.append(f"{source}{error}")
    return _with_named_policy(chosen, bodies, last, choices.get("policy", ("", "file"))), experiment


def _with_named_policy(
    chosen: list[_Assignment], bodies: list[_Assignment], last: list[_Assignment], choice: tuple[str, str]
) -> list[_Assignment]:
    """All assignments in order. A saved configuration names its policy in its body, where the group's file on
    the command line would not reach; another policy's own options do not come along.
    """
    again = [] if choice[1] else [i for i in chosen if i.key in ("policy.name", "policy.scorer.type")]
    names = {item.key: item.value for item in [*again, *last]}
    saved = next((item.value for item in bodies if item.key == "policy.name"), None)
    if saved is not None and names.get("policy.name", saved) != saved:
        bodies = [item for item in bodies if not item.key.startswith("policy.options")]
    return [*chosen, *bodies, *again, *last]


def _flatten(body: Mapping[str, Any], prefix: str, source: str) -> Iterator[_Assignment]:
    for name, value in body.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key in groups():
            yield from _flatten(value, f"{key}.", source)
        elif value is not None or key not in groups():  # `policy:` with nothing under it says nothing
            yield _Assignment(key, value, source)


def _apply(tree: DictConfig, item: _Assignment, problems: list[str]) -> None:
    """Sets one value, or adds one line to `problems`."""
    key, source = item.key, item.source
    if key in groups() and key:
        if source and key in top_groups():
            problems.append(f"{source}{key}: to choose a file write it under `defaults:`")
        else:
            children = ", ".join(f"{key}.{name}" for name in groups()[key])
            problems.append(f"{source}{key} is a group of keys: set {children}")
        return
    setting = settings().get(key) or settings().get(key.rpartition(".")[0])
    in_mapping = setting is not None and setting.key != key
    if setting is None or (in_mapping and get_origin(setting.type) is not dict):
        known = [*settings(), *top_groups()]
        problems.append(f"{source}unknown key '{key}'{_hint(did_you_mean(key, known))}")
        return
    try:
        if in_mapping and get_args(setting.type)[1] is Any:
            value = _of_any_kind(item.value)
        elif in_mapping:
            value = str(item.value)
        else:
            value = _parsed(item.value, setting)
        OmegaConf.update(tree, key, value, force_add=False)
    except (OmegaConfBaseException, yaml.YAMLError):
        problems.append(f"{source}{key}={item.value}: expected {setting.expected}, got {_shown(item.value)}")


def _of_any_kind(value: Any) -> Any:
    """A word as YAML reads it, and `1e-3`, which YAML takes for text, as the number it is."""
    value = yaml.safe_load(value) if isinstance(value, str) else value
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


def _parsed(value: Any, setting: Setting) -> Any:
    """A command line's word as the value it stands for; what a file says stays as YAML read it."""
    if value is None or (setting.optional and value in ("", "null")):
        return None
    if setting.type is str or not isinstance(value, str):
        return value
    if get_origin(setting.type) is list and not value.startswith(("[", "$")):
        return [part.strip() for part in value.split(",") if part.strip()]
    return yaml.safe_load(value)


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "nothing"
    return f"{value!r} ({type(value).__name__})"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.partition(":")[2].strip() for line in lines if line.startswith("full_key:")), "")
    return f"{key}: {lines[0]}" if key else lines[0]


@cache
def _schema_tree() -> DictConfig:
    """The schema as a writable tree; building it costs more than all the rest."""
    tree = OmegaConf.structured(Config())
    _unlock(tree)
    return tree


def _unlock(node: Any) -> None:
    """OmegaConf makes the nodes of frozen dataclasses read-only; they must be writable until `to_object`."""
    OmegaConf.set_readonly(node, False)
    if isinstance(node, DictConfig):
        for name in node:
            child = node._get_node(name)
            if OmegaConf.is_config(child):
                _unlock(child)
