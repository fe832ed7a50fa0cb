"""How far training has read, and the order in which rows are read.

The position counts rows that were handed to training, in the main process and over all processes together.
What workers have fetched ahead is not part of it, so a checkpoint is exact under any number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from kvpop_lightning.errors import UserError

_PLACE = ("epoch", "rows_consumed", "cursor", "skip")


@dataclass
class Position:
    """Reading position. `mode` is `rows` (prepared) or `stream`; `cursor` and `skip` are used by streams
    only: the last row handed out by this process, and how many rows after it belong to the same global
    step."""

    fingerprint: str
    seed: int
    mode: str
    epoch: int = 0
    rows_consumed: int = 0
    cursor: int = -1
    skip: int = 0

    def __post_init__(self) -> None:
        self._before = self._place()

    def _place(self) -> dict[str, int]:
        return {key: getattr(self, key) for key in _PLACE}

    def advance(self, rows: int, *, cursor: int = -1, skip: int = 0) -> None:
        """A batch was handed out: `rows` rows over all processes."""
        self._before = self._place()
        self.rows_consumed += rows
        self.cursor, self.skip = cursor, skip

    def state_dict(self, *, unfinished: bool = False) -> dict[str, Any]:
        """The position as plain values; `unfinished`: the last batch handed out does not count yet."""
        place = self._before if unfinished else self._place()
        return {"fingerprint": self.fingerprint, "seed": self.seed, "mode": self.mode, **place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to a saved position.

        Raises:
            UserError: it belongs to another data set, seed or mode; both fingerprints are named.
        """
        if state["fingerprint"] != self.fingerprint:
            raise UserError(
                f"the data set changed: the checkpoint was trained on {state['fingerprint']}, the "
                f"configuration now gives {self.fingerprint}; restore the data settings and files, or train "
                "from the start in another run_dir"
            )
        for key in ("seed", "mode"):
            if state[key] != getattr(self, key):
                raise UserError(
                    f"the checkpoint read its rows with {key}={state[key]}, now it is {getattr(self, key)}"
                )
        for key in _PLACE:
            setattr(self, key, int(state[key]))
        self._before = self._place()


class RowBatchSampler(Sampler[list[int]]):
    """Row numbers of this process, a list of `rows_per_step` per step, in an order drawn anew each epoch.

    The order over all processes is a permutation by (seed, epoch); step `n` of the epoch takes the next
    `world_size * rows_per_step` rows of it, each process its own part. It therefore does not depend on the
    number of processes. A rest that does not fill a step is left out of that epoch. Iterating starts at
    `position`.
    """

    def __init__(
        self, num_rows: int, rows_per_step: int, position: Position, *, rank: int = 0, world_size: int = 1
    ) -> None:
        self.num_rows, self.rows_per_step, self.position = num_rows, rows_per_step, position
        self.rank, self.world_size = rank, world_size
        if num_rows < self.rows_of_step:
            raise UserError(
                f"a step takes {self.rows_of_step} rows (trainer.rows_per_step times trainer.devices), "
                f"there are {num_rows} training rows; lower trainer.rows_per_step or raise data.train_rows"
            )

    @property
    def rows_of_step(self) -> int:
        """Rows of one step over all processes."""
        return self.rows_per_step * self.world_size

    def __len__(self) -> int:
        """Steps of a whole epoch, not of what is left of it: Lightning counts the steps before a resume."""
        return self.num_rows // self.rows_of_step

    def order(self, epoch: int) -> np.ndarray:
        """Permutation of the rows in that epoch, int64 [num_rows]."""
        return np.random.default_rng((self.position.seed, epoch)).permutation(self.num_rows)

    def begin(self) -> None:
        """Called before an epoch is read: moves on to the next one when this one is finished."""
        if self.position.rows_consumed + self.rows_of_step > self.num_rows:
            self.position.epoch += 1
            self.position.rows_consumed = 0

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order(self.position.epoch)
        first = self.position.rows_consumed
        for start in range(first, self.num_rows - self.rows_of_step + 1, self.rows_of_step):
            own = start + self.rank * self.rows_per_step
            yield order[own : own + self.rows_per_step].tolist()
