"""The mLSTM memory as definition and as recurrence (METHOD.md, section 5).

Every form takes the same tensors: query, key [B, H, T, d_m], value [B, H, T, d_v], the pre-activations of the
input and forget gates [B, H, T], and reads at row p with the query that stands at row p (a delayed read hands
in shifted queries, see `delayed_read.py`). `C_t = f_t C_{t-1} + i_t k_t v_t^T`, `n_t = f_t n_{t-1} + i_t k_t`
with `i = exp(input gate)`, `f = sigmoid(forget gate)`, keys scaled by d_m^-0.5, and
`h_p = C_p^T q_p / max(|n_p . q_p|, exp(-m_p))`, all held scaled by exp(-m), m the running maximum.

* `mlstm_quadratic`: the definition written as attention with a decay matrix; for tests, in float64.
* `mlstm_recurrent`: one token after the other; what decoding does.
* `mlstm_chunkwise` (own file): linear in T, what training and prefill run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EMPTY = -1e30
"""Stands for m = -inf (nothing absorbed yet): finite, so that differences of two of them are 0 and not
NaN."""
LARGEST_EXPONENT = 80.0
"""-m is clamped here before exp (METHOD.md, section 5)."""


def empty_state(batch: int, heads: int, key_dim: int, value_dim: int, like: Tensor) -> dict[str, Tensor]:
    """memory C [B, H, d_m, d_v] and normalizer n [B, H, d_m], both scaled by exp(-m); log_scale m [B, H]."""
    return {
        "memory": like.new_zeros(batch, heads, key_dim, value_dim),
        "normalizer": like.new_zeros(batch, heads, key_dim),
        "log_scale": like.new_full((batch, heads), EMPTY),
    }


def running_document(document_ids: Tensor) -> Tensor:
    """Id of the newest real token at or before each row, -1 before the first; padding changes nothing."""
    return document_ids.cummax(dim=-1).values


def gates(input_gate: Tensor, forget_gate: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """log i and log f [B, H, T]; tokens that are not valid add nothing (log i = EMPTY) and forget nothing."""
    log_forget = F.logsigmoid(forget_gate)
    if valid is None:
        return input_gate, log_forget
    real = valid[:, None]
    return input_gate.masked_fill(~real, EMPTY), log_forget.masked_fill(~real, 0.0)


def readout(numerator: Tensor, projection: Tensor, log_scale: Tensor) -> Tensor:
    """`C^T q / max(|n . q|, exp(-m))` from its parts [..., d_v], [...], [...]."""
    floor = (-log_scale).clamp(max=LARGEST_EXPONENT).exp()
    return numerator / torch.maximum(projection.abs(), floor)[..., None]


def mlstm_quadratic(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    *,
    document_ids: Tensor | None = None,
) -> Tensor:
    """h [B, H, T, d_v] by the [T, T] decay matrix. Give it float64: its cumulative sum runs over all of T."""
    length = query.shape[2]
    valid = None if document_ids is None else document_ids >= 0
    log_input, log_forget = gates(input_gate, forget_gate, valid)
    total = log_forget.cumsum(dim=-1)
    log_weight = total[..., :, None] - total[..., None, :] + log_input[..., None, :]  # [B, H, p, j]
    visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    if document_ids is not None:
        document = running_document(document_ids)
        visible = visible & (document[:, None, :, None] == document[:, None, None, :])
        visible = visible & (document_ids >= 0)[:, None, None, :]
    log_weight = log_weight.masked_fill(~visible, EMPTY)
    log_scale = log_weight.amax(dim=-1)  # m_p, exactly the running maximum of the recurrence
    weight = (log_weight - log_scale[..., None]).exp() * visible
    weight = weight * (query @ key.transpose(-1, -2)) * key.shape[-1] ** -0.5
    return readout(weight @ value, weight.sum(dim=-1), log_scale)


def mlstm_recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    *,
    state: dict[str, Tensor],
    valid: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """h [B, H, T, d_v] and the state after the last token, one token at a time. `valid` bool [B, T]."""
    log_input, log_forget = gates(input_gate, forget_gate, valid)
    key = key * key.shape[-1] ** -0.5
    memory, normalizer, log_scale = state["memory"], state["normalizer"], state["log_scale"]
    outputs = []
    for t in range(query.shape[2]):
        grown = torch.maximum(log_forget[..., t] + log_scale, log_input[..., t])
        keep = (log_forget[..., t] + log_scale - grown).exp()[..., None]  # f'
        take = (log_input[..., t] - grown).exp()[..., None]  # i'
        if valid is not None:  # before the first real token EMPTY - EMPTY = 0 would let padding in
            take = take * valid[:, t, None, None]
        log_scale = grown
        added = take * key[..., t, :]  # [B, H, d_m]
        memory = keep[..., None] * memory + added[..., None] * value[..., t, None, :]
        normalizer = keep * normalizer + added
        q = query[..., t, :]
        numerator = (q[..., None, :] @ memory).squeeze(-2)
        outputs.append(readout(numerator, (q * normalizer).sum(dim=-1), log_scale))
    return torch.stack(outputs, dim=2), {"memory": memory, "normalizer": normalizer, "log_scale": log_scale}
