"""The tokenizer of a configured model, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpop_lightning.config.schema import ModelConfig
from kvpop_lightning.errors import UserError


def load_tokenizer(config: ModelConfig) -> Any:
    """The same tokenizer as `load_model` gives.

    Raises:
        UserError: it cannot be found.
    """
    from transformers import AutoTokenizer

    from kvpop_lightning.models import sources

    if config.source not in ("path", "hub"):
        # The package's folder is converted once; the toy models' tokenizers come with their few weights.
        if config.source == sources.PACKAGE:
            from kvpop_lightning.models.smollm2 import smollm2_folder

            return AutoTokenizer.from_pretrained(smollm2_folder(config.cache_dir))
        return sources.load_model(config)[1]
    revision = {"revision": config.revision} if config.source == "hub" and config.revision else {}
    try:
        return AutoTokenizer.from_pretrained(str(config.path), **revision)
    except (OSError, ValueError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = "folder" if Path(str(config.path)).is_dir() else "path and network"
        raise UserError(
            f"tokenizer of {config.path!r} cannot be loaded ({line}): check the {where}"
        ) from error
