"""Schema, files and command line to one frozen configuration. Imports neither torch nor any heavy library."""

from __future__ import annotations

from kvpop_lightning.config.compose import compose, to_yaml
from kvpop_lightning.config.schema import Config

__all__ = ["Config", "compose", "to_yaml"]
