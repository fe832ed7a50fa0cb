"""Sparse attention under eviction times, and the dense attention of the teacher."""

from __future__ import annotations

from kvpop_lightning.attention.dispatch import BACKENDS, as_autocast, sparse_attention, unavailable_backends
from kvpop_lightning.attention.reference import log_normalizer, reference_attention, visible_keys
from kvpop_lightning.attention.sdpa import dense_attention, masked_attention
from kvpop_lightning.attention.segments import Segment, find_segments
from kvpop_lightning.attention.soft import soft_attention

__all__ = [
    "BACKENDS",
    "Segment",
    "as_autocast",
    "dense_attention",
    "find_segments",
    "log_normalizer",
    "masked_attention",
    "reference_attention",
    "soft_attention",
    "sparse_attention",
    "unavailable_backends",
    "visible_keys",
]
