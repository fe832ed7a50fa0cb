"""Text from a model: continuous slots, sampling, and decode steps at the speed of memory."""

from __future__ import annotations

from kvpop_lightning.generation.engine import Completion, Engine, Piece
from kvpop_lightning.generation.sampling import Sampling

__all__ = ["Completion", "Engine", "Piece", "Sampling"]
