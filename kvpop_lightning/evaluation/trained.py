"""Where trained policies lie and how one is read back for a comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpop_lightning.baselines import get
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError
from kvpop_lightning.models import load
from kvpop_lightning.models.fingerprint import base_fingerprint
from kvpop_lightning.policy import RetentionPolicy

DESCRIPTION = "kvpop.json"


def policy_folder(config: Config, name: str) -> Path:
    """`run_dir/policy/<name>`, where training saves."""
    return Path(config.run_dir) / "policy" / name


def is_trained(folder: Path) -> bool:
    """A complete saved policy lies there (its description is written last)."""
    return (folder / DESCRIPTION).is_file()


def trained_names(names: Sequence[str]) -> list[str]:
    """Those policies of `names` that have something to train, each once."""
    return [name for name in dict.fromkeys(names) if get(name).trained]


def load_trained(folder: Path, model: Any) -> tuple[RetentionPolicy, Any, str | None]:
    """A saved policy, on the model it is to be judged on.

    Args:
        folder: what training saved.
        model: the retrofitted dense teacher; its own policy is left as it was.

    Returns:
        The policy; the model it runs on, None = `model` itself (its base was not trained); and that base's
        fingerprint, None likewise.

    Raises:
        UserError: nothing is saved there, or it belongs to other base weights.
    """
    if not is_trained(folder):
        raise UserError(
            f"{folder.name} is not trained yet, {folder} holds no policy: run kvpop train "
            f"policy={folder.name} with the same run_dir, or leave it out of eval.policies"
        )
    about = json.loads((folder / DESCRIPTION).read_text())["base"]
    if about["weights"] and about["fingerprint"] != base_fingerprint(model):
        # The base was trained with the policy: a model of its own beside the teacher.
        own = load(folder).to(next(model.parameters()).device)
        return own.kvpop, own, str(about["fingerprint"])
    before = model.kvpop
    try:
        return load(folder, base=model).kvpop, None, None
    finally:
        model.kvpop = before
