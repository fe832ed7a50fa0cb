"""Lightning callbacks, one per file."""

from kvpop_lightning.training.callbacks.checkpoint import TrainingCheckpoint
from kvpop_lightning.training.callbacks.graceful_stop import GracefulStop
from kvpop_lightning.training.callbacks.gradient_norm import GradientNorm
from kvpop_lightning.training.callbacks.progress import TrainingProgress
from kvpop_lightning.training.callbacks.random_state import RandomState
from kvpop_lightning.training.callbacks.throughput import Throughput

__all__ = [
    "GracefulStop",
    "GradientNorm",
    "RandomState",
    "Throughput",
    "TrainingCheckpoint",
    "TrainingProgress",
]
