"""Text from a model: continuous slots, sampling, and decode steps at the speed of memory."""

from __future__ import annotations
