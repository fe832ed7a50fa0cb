"""What a caller may get wrong about padding and positions, each refused in one line."""

from __future__ import annotations

import torch
from torch import Tensor


def check_mask(attention_mask: Tensor | None, batch: int, columns: int, q_len: int) -> None:
    """The padding mask must cover every column the cache has seen and the new ones.

    Raises:
        ValueError: not a tensor of two axes, or another length or batch size.
    """
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        shape = (
            tuple(attention_mask.shape)
            if isinstance(attention_mask, Tensor)
            else type(attention_mask).__name__
        )
        raise ValueError(
            f"attention_mask must be a padding mask [B, T], got {shape}: ready attention masks (4-D) are not "
            "supported, the policy decides what is seen"
        )
    if attention_mask.shape != (batch, columns + q_len):
        raise ValueError(
            f"attention_mask must cover the {columns} columns seen and the {q_len} new ones of {batch} rows, "
            f"[{batch}, {columns + q_len}], got {list(attention_mask.shape)}"
        )


def real_columns(attention_mask: Tensor | None, seen: Tensor, columns: int, q_len: int) -> Tensor | None:
    """bool [B, q_len], which new columns hold a real token; None when all do.

    Raises:
        ValueError: the mask's past disagrees with the tokens that the cache has seen.
    """
    if attention_mask is None:
        return None
    mask = attention_mask != 0
    real = mask[:, columns:]
    past_fits = (mask[:, :columns].sum(dim=1) == seen).all()
    past_fits, all_real = torch.stack([past_fits, real.all()]).tolist()  # one wait for the device
    if not past_fits:
        raise ValueError(
            f"attention_mask marks {mask[:, :columns].sum(dim=1).tolist()} real tokens in the columns seen "
            f"before, but the cache has seen {seen.tolist()}: pass the same padding as before, with the new "
            "columns added"
        )
    return None if all_real else real


def check_positions(
    position_ids: Tensor | None, seen: Tensor, real: Tensor | None, batch: int, q_len: int
) -> Tensor:
    """Positions int64 [B, q_len] that count each row's real tokens on from `seen`; padding 0.

    Raises:
        ValueError: `position_ids` say otherwise, as they do in packed rows.
    """
    if real is None:
        position = seen[:, None] + torch.arange(q_len, device=seen.device)
    else:
        position = seen[:, None] + real.long().cumsum(dim=1) - 1
        position = position.masked_fill(~real, 0)
    if position_ids is None:
        return position
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != q_len:
        raise ValueError(
            f"position_ids must be [{batch}, {q_len}], one per new column, got {list(position_ids.shape)}"
        )
    wrong = position_ids != position
    if real is not None:
        wrong = wrong & real
    if bool(wrong.any()):
        row, column = (int(n) for n in wrong.nonzero()[0])
        got = int(position_ids.expand(batch, -1)[row, column])
        raise ValueError(
            f"position_ids must count the real tokens of each row: row {row}, new column {column} should be "
            f"{int(position[row, column])}, got {got}. A BoundedCache holds one document per row: give "
            "packed documents as rows of a batch, pad on the left, or leave position_ids out"
        )
    return position
