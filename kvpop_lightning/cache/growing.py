"""Layers whose memory grows with the text: no budget bounds what a head holds."""

from __future__ import annotations

from kvpop_lightning.cache.layer import BoundedLayer


class GrowingLayer(BoundedLayer):
    """Allocates as the text needs it, and gives all of it back with the text."""

    holds_budget = False

    def reset(self) -> None:
        """Forgets the text and gives its memory back."""
        if self._store:
            self.release()
        self.columns, self._log = 0, None
