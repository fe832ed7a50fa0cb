"""The bounded key-value cache: exactly `budget.total` slots per layer and KV head (METHOD.md, section 6)."""

from __future__ import annotations

from kvpop_lightning.cache.bounded import BoundedCache

__all__ = ["BoundedCache"]
