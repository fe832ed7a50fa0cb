"""Text from a model: continuous slots, sampling, and decode steps at the speed of memory."""

from __future__ import annotations

from kvpop_lightning.generation.engine import Engine
from kvpop_lightning.generation.requests import Completion, Piece
from kvpop_lightning.generation.sampling import Sampling

__all__ = ["Completion", "Engine", "Piece", "Sampling"]
