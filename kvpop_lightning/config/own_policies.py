"""Policies of the user's own, from a Python file named by `policy.module`."""

from __future__ import annotations

import importlib.util
import sys
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from kvpop_lightning.errors import UserError


def import_policies(path: str) -> None:
    """Runs the file, which registers its scorers and policies; a second call does nothing.

    Raises:
        UserError: no such file, or an error inside it.
    """
    file = Path(path)
    name = f"kvpop_own_{file.stem}"
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


def code_key(scorer: object) -> dict[str, str]:
    """What tells one version of the user's own rule from another in stored results: a hash of its file.

    Empty for what this package brings. A class without a file (made in a notebook) is new every time.
    """
    made = type(scorer)
    if made.__module__.startswith("kvpop_lightning."):
        return {}
    file = getattr(sys.modules.get(made.__module__), "__file__", None)
    if file is None:
        return {"code": uuid4().hex}
    return {"code": sha256(Path(file).read_bytes()).hexdigest()}
