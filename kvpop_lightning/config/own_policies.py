"""Policies of the user's own, from a Python file named by `policy.module`."""

from __future__ import annotations

import importlib.util
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from kvpop_lightning.config.choices import POLICIES
from kvpop_lightning.errors import UserError


def import_policies(path: str) -> None:
    """Runs the file, which registers its scorers and policies; a second call does nothing.

    Raises:
        UserError: no such file, or an error inside it.
    """
    file = Path(path)
    name = f"kvpop_own_{file.stem}_{sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return
    if not file.is_file():
        raise UserError(f"policy.module={path}: no such file; name a Python file that registers a policy")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"policy.module={path}: not a Python file, its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"policy.module={path}: {type(error).__name__}: {error}") from error


def code_key(policy: str, scorer: object, module: str | None) -> dict[str, Any]:
    """What tells one version of a policy of the user's own from another in stored results: hashes of the file
    of its scorer's class and of `policy.module`. What these files import is not covered.

    Empty for the policies of this package. A class without a file (made in a notebook) is new every time.
    """
    if policy in POLICIES:
        return {}
    made = type(scorer)
    file = getattr(sys.modules.get(made.__module__), "__file__", None)
    if file is None and module is None:
        return {"code": uuid4().hex}
    files = {Path(name).resolve() for name in (file, module) if name is not None}
    return {"code": sorted(sha256(file.read_bytes()).hexdigest() for file in files)}
