"""Folders named in the settings are looked at before the libraries load, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from kvpop_lightning.config.schema import Config, ModelConfig
from kvpop_lightning.errors import ConfigError


def check_folders(config: Config) -> None:
    """Looks at what the settings name; makes nothing.

    Raises:
        ConfigError: a folder to write into is a file, or lies below one; `model.path` is no folder.
    """
    written = {
        "run_dir": config.run_dir,
        "data.cache_dir": config.data.cache_dir,
        "model.cache_dir": config.model.cache_dir,
        "trainer.feature_cache_dir": config.trainer.feature_cache_dir,
    }
    problems = [
        f"{key}={folder}: {file} is a file, not a folder; name another"
        for key, folder in written.items()
        if (file := _file_in_the_way(Path(folder))) is not None
    ]
    if problem := no_model_folder(config.model):
        problems.append(problem)
    if problems:
        raise ConfigError(problems)


def no_model_folder(model: ModelConfig) -> str | None:
    """What is wrong where `model.path` should be a checkpoint's folder and is none."""
    if model.source == "path" and model.path and not Path(model.path).is_dir():
        return f"model.path={model.path} is not a folder: give the folder of a saved checkpoint"
    return None


def _file_in_the_way(folder: Path) -> Path | None:
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    return there if there is not None and not there.is_dir() else None
