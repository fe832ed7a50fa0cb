"""KVpop: learn what a KV cache should evict. Public names are imported on first use: `import` stays cheap."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Budget": "kvpop_lightning.policy",
    "BoundedCache": "kvpop_lightning.cache",
    "dense": "kvpop_lightning.models",
    "load": "kvpop_lightning.models",
    "replay": "kvpop_lightning.models",
    "retrofit": "kvpop_lightning.models",
}
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
