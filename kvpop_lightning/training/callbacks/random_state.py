"""Random number generators travel with the checkpoint, so that a resumed run draws what the whole run would
have.
"""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch


class RandomState(pl.Callback):
    """Saves the states of Python, NumPy, torch and CUDA after every step and restores them before the first
    resumed one.

    The losses draw from generators that depend on (seed, step, row) only; this serves dropout and user code.
    """

    def __init__(self) -> None:
        self._restore: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        numpy_state = np.random.get_state(legacy=False)
        assert isinstance(numpy_state, dict)
        generator = numpy_state["state"]
        return {
            "python": random.getstate(),
            "numpy": {
                **numpy_state,
                "state": {
                    "key": torch.from_numpy(generator["key"].astype(np.int64)),
                    "pos": int(generator["pos"]),
                },
            },
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restore = state_dict

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        # Not earlier: setting up loaders and loggers draws numbers too.
        if self._restore is None:
            return
        state, self._restore = self._restore, None
        random.setstate(state["python"])
        key = state["numpy"]["state"]["key"].numpy().astype(np.uint32)
        np.random.set_state({**state["numpy"], "state": {"key": key, "pos": state["numpy"]["state"]["pos"]}})
        torch.set_rng_state(state["torch"].cpu())
        if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
