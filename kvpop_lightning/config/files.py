"""Where configuration files lie and how one is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvpop_lightning.config.choices import did_you_mean
from kvpop_lightning.errors import UserError

FOLDER = "configs"
LOCAL = "local.yaml"


def config_roots() -> list[Path]:
    """Folders to look in, best first: the nearest `configs` upward from the working folder, then the
    package's own."""
    here = Path.cwd()
    roots = [folder / FOLDER for folder in (here, *here.parents) if (folder / FOLDER).is_dir()][:1]
    beside_package = Path(__file__).resolve().parents[2] / FOLDER
    if beside_package.is_dir() and beside_package.resolve() not in [root.resolve() for root in roots]:
        roots.append(beside_package)
    return roots


def project_folder() -> Path:
    """The folder that holds the nearest `configs` upward from the working folder, else the working folder."""
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / FOLDER).is_dir()), here)


def group_file(group: str, name: str) -> Path:
    """`configs/<group>/<name>.yaml`; for experiments also a path that ends in .yaml.

    Raises:
        UserError: no such file; the message names the nearest choices.
    """
    if group == "experiment" and name.endswith((".yaml", ".yml")):
        path = Path(name)
        if path.is_file():
            return path
        raise UserError(f"experiment={name}: there is no such file")
    roots = config_roots()
    for root in roots:
        path = root / group / f"{name}.yaml"
        if path.is_file() and path.parent == root / group:
            return path
    if not roots:
        raise UserError(
            f"{group}={name}: found no '{FOLDER}' folder in {Path.cwd()} or above it: run from the "
            "project folder, or set single keys instead"
        )
    own = "; a policy of your own needs policy.module=FILE.py beside it" if group == "policy" else ""
    raise UserError(
        f"{group}={name}: there is no {FOLDER}/{group}/{name}.yaml{did_you_mean(name, names(group))}{own}"
    )


def names(group: str) -> list[str]:
    """Choices of a group, from all roots."""
    return sorted({path.stem for root in config_roots() for path in (root / group).glob("*.yaml")})


def local_file() -> Path | None:
    """`configs/local.yaml` of this checkout, if there is one (git-ignored: machine settings such as
    paths)."""
    roots = config_roots()
    return roots[0] / LOCAL if roots and (roots[0] / LOCAL).is_file() else None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        UserError: unreadable, not YAML (with line and column), or not a mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise UserError(f"{where}: not valid YAML: {error.problem or error}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected keys and values, got a {type(content).__name__}")
    return {str(key): value for key, value in content.items()}
