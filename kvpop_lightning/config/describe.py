"""The schema read back: every key with its type, default and the text that stands under it in `schema.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from kvpop_lightning.config import schema, schema_data, schema_gates, schema_generate, schema_sweeps


@dataclass(frozen=True)
class Setting:
    """One leaf of the configuration."""

    key: str
    type: Any
    """The type without `| None`."""
    optional: bool
    default: Any
    doc: str

    @property
    def expected(self) -> str:
        """The type in a user's words: `int`, `list of str`, `float or null` ..."""
        origin, arguments = get_origin(self.type), get_args(self.type)
        if origin is list:
            text = f"list of {arguments[0].__name__}"
        elif origin is dict:
            text = f"mapping of {arguments[0].__name__} to {arguments[1].__name__}"
        else:
            text = self.type.__name__
        return text + (" or null" if self.optional else "")


@cache
def settings() -> dict[str, Setting]:
    """Every leaf by its dotted key, in the order of the schema."""
    return {setting.key: setting for setting in _walk(schema.Config, "")}


@cache
def groups() -> dict[str, tuple[str, ...]]:
    """Every inner node (`policy`, `policy.budget`, ...) with the names directly under it; `""` is the
    root."""
    found: dict[str, list[str]] = {"": []}
    for key in settings():
        parts = key.split(".")
        for depth, part in enumerate(parts):
            children = found.setdefault(".".join(parts[:depth]), [])
            if part not in children:
                children.append(part)
    return {node: tuple(children) for node, children in found.items()}


def top_groups() -> tuple[str, ...]:
    """Groups that a file can be chosen for: `policy=NAME` reads `configs/policy/NAME.yaml`."""
    return tuple(name for name in groups()[""] if name in groups())


def _walk(owner: type, prefix: str) -> Iterator[Setting]:
    hints, docs = get_type_hints(owner), _docs()[owner.__name__]
    for item in fields(owner):
        kind, optional = _without_none(hints[item.name])
        key = f"{prefix}{item.name}"
        if is_dataclass(kind) and isinstance(kind, type):
            yield from _walk(kind, f"{key}.")
        else:
            yield Setting(key, kind, optional, _default(item), docs.get(item.name, ""))


def _without_none(kind: Any) -> tuple[Any, bool]:
    if get_origin(kind) is UnionType:
        rest = [part for part in get_args(kind) if part is not NoneType]
        assert len(rest) == 1, f"the schema allows only `X | None`, not {kind}"
        return rest[0], True
    return kind, False


def _default(item: Field[Any]) -> Any:
    if item.default is not MISSING:
        return item.default
    assert item.default_factory is not MISSING
    return item.default_factory()


@cache
def _docs() -> dict[str, dict[str, str]]:
    """The string under each field, read from the source: attribute docstrings do not exist at run time."""
    modules = (schema, schema_data, schema_gates, schema_generate, schema_sweeps)
    sources = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules]
    docs: dict[str, dict[str, str]] = {}
    for node in (node for source in sources for node in ast.parse(source).body):
        if isinstance(node, ast.ClassDef):
            texts = docs.setdefault(node.name, {})
            for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    constant = following.value if isinstance(following, ast.Expr) else None
                    if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                        texts[statement.target.id] = " ".join(constant.value.split())
    return docs
