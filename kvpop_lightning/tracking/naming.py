"""Names and values in the form that MLflow accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_NAME = 250
MAX_PARAM = 6000
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_/. -]+")


def metric_name(name: str) -> str:
    """`name` with only letters, digits and `_ / . - space`, not empty, not path-like, at most 250 characters.

    `+` becomes `_plus_`, so that `random` and `random+decay` stay apart; what else is not allowed becomes
    `_`.
    """
    cleaned = _FORBIDDEN.sub("_", name.replace("+", "_plus_").replace("%", "_percent"))
    parts = [part for part in cleaned.split("/") if part.strip() not in ("", ".", "..")]
    return "/".join(parts)[:MAX_NAME].rstrip("/ ") or "_"


def flat_params(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested mapping as dotted names and text values; lists and empty mappings as JSON, no passwords."""
    found: dict[str, str] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found |= flat_params(value, f"{key}.")
        else:
            text = json.dumps(value, default=str) if isinstance(value, list | tuple | Mapping) else str(value)
            found[metric_name(key)] = public_uri(text)[:MAX_PARAM]
    return found


def public_uri(uri: str) -> str:
    """`uri` without user name and password, fit for files and messages."""
    return re.sub(r"(://)[^/@]*@", r"\1***@", uri)
