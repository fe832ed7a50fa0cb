"""Tile sizes of the Triton kernels, and whether they can run at all. Imports without Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpop_lightning.policy.triton_choice import missing

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST_HEAD = 256
_LARGEST_GROUP = 128
_UNIT_ROWS = 64


@dataclass(frozen=True)
class Tile:
    """`m` rows (queries times the heads of a group) by `n` keys; warps and pipeline stages of a program."""

    m: int
    n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class KernelPlan:
    """How the kernels cut their work.

    Args:
        group: query heads per KV head.
        block_d: head dimension, rounded up to a power of two (the rest is masked).
        forward, query_gradient, key_gradient: tiles of the three kernels.
        list_rows: rows that share a list of the forward pass (a multiple of the tiles' m).
        gradient_block: queries that share a list of the key gradients.
        lifetime_chunk: births that are sorted together where each key is in one list only.
        precision: of float32 products.
    """

    group: int
    block_d: int
    forward: Tile
    query_gradient: Tile
    key_gradient: Tile
    list_rows: int = 512
    gradient_block: int = 512
    lifetime_chunk: int = 2048
    precision: str = "ieee"

    def queries(self, rows: int) -> int:
        """Queries in a tile of so many rows: whole groups only, and twice as many in twice the rows."""
        unit = max(_UNIT_ROWS, 1 << (self.group - 1).bit_length())
        return rows // self.group if rows < unit else (unit // self.group) * (rows // unit)

    @property
    def list_block(self) -> int:
        """Queries per list: a multiple of the queries of the larger and of the smaller tile."""
        unit = max(self.queries(self.forward.m), self.queries(self.query_gradient.m))
        return unit * max(1, self.list_rows // (unit * self.group))


def plan_for(dtype: torch.dtype, group: int, head_dim: int) -> KernelPlan:
    """The tiles that were fastest on an H200 (docs/training_attention.md); smaller ones where registers
    end."""
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    rows = max(16, 1 << (group - 1).bit_length())
    if dtype == torch.float32:
        small = Tile(max(32, rows), 32, 8, 1)
        return KernelPlan(group, block_d, small, small, small)
    if block_d <= 128:
        m = max(128, rows)
        return KernelPlan(
            group, block_d, Tile(256, 64, 8, 3), Tile(m, 128, 8, 2), Tile(max(64, rows), 128, 8, 1)
        )
    wide, tall = Tile(max(64, rows), 32, 8, 2), Tile(max(32, rows), 64, 8, 1)
    return KernelPlan(group, block_d, wide, wide, tall)


def unsupported(query: Tensor, key: Tensor, scale: float) -> str | None:
    """Why the kernels cannot take these tensors, in a few words; None when they can."""
    group, D = query.shape[1] // key.shape[1], query.shape[3]
    if reason := missing(query):
        return reason
    if query.dtype not in _DTYPES:
        return f"Triton kernels take bfloat16, float16 and float32, not {query.dtype}"
    if D > _LARGEST_HEAD:
        return f"Triton kernels take head dimensions up to {_LARGEST_HEAD}, not {D}"
    if group > _LARGEST_GROUP:
        return f"Triton kernels take up to {_LARGEST_GROUP} query heads per KV head, not {group}"
    if scale <= 0:
        return f"Triton kernels need a scale above 0, not {scale}"
    return None
