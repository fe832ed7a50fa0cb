"""The mLSTM in chunks: linear in T, few operations, exact (METHOD.md, section 5).

Inside a chunk the memory is read as attention with a decay matrix [L, L]; across chunks it is carried as a
state.
No cumulative sum runs over more than a chunk in float32: sums of whole chunks are taken in float64, where
they are [B, H, chunks] numbers. Documents are masks, not resets, so one that starts inside a chunk costs
nothing.

The scale m is a constant to autograd: `h` does not depend on it (short of the clamp at exp(80), which is
reached only when every input gate seen so far is below e^-80).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpop_lightning.policy.scorers.mlstm_forms import EMPTY, empty_state, gates, readout, running_document

CHUNKS_PER_SCAN = {"cpu": 32}
"""By device type: one small triangular matrix combines the states of so many chunks, then they are carried.
256 elsewhere: a GPU has time for the larger matrix, the rounds are what it waits for."""


def mlstm_chunkwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    *,
    document_ids: Tensor | None = None,
    valid: Tensor | None = None,
    state: dict[str, Tensor] | None = None,
    chunk: int = 32,
) -> tuple[Tensor, dict[str, Tensor]]:
    """h [B, H, T, d_v] and the state after the last row; tensors as in `mlstm_forms`.

    Args:
        document_ids: int64 [B, T], -1 = padding, which is never absorbed; the memory starts anew in each
            document.
        valid: bool [B, T], alternative to `document_ids` when each row is one document (decoding).
        state: memory to go on from (one document per row only); None = empty.
        chunk: L; speed only.
    """
    assert document_ids is None or (valid is None and state is None), "packed rows start from an empty memory"
    batch, heads, length, key_dim = query.shape
    value_dim = value.shape[-1]
    size = min(chunk, length)
    padding = -length % size
    chunks = (length + padding) // size

    document: Tensor | None = None
    if document_ids is not None:
        valid, document = document_ids >= 0, running_document(document_ids)
    if padding:  # filler rows: not valid, of the last document
        if valid is None:
            valid = query.new_ones(batch, length, dtype=torch.bool)
        valid = F.pad(valid, (0, padding))
        if document is not None:
            document = torch.cat([document, document[:, -1:].expand(-1, padding)], dim=1)
        query, key, value = (F.pad(x, (0, 0, 0, padding)) for x in (query, key, value))
        input_gate, forget_gate = F.pad(input_gate, (0, padding)), F.pad(forget_gate, (0, padding))
    log_input, log_forget = gates(input_gate, forget_gate, valid)
    ones = value.new_ones(batch, 1, 1, 1) if valid is None else valid[:, None, :, None].to(value.dtype)
    if valid is not None:
        value = value * ones
    # The normaliser is the memory of a value that is always 1: one more column.
    value = torch.cat([value, ones.expand(batch, heads, length + padding, 1)], dim=-1)

    def split(x: Tensor) -> Tensor:  # [B, H, T, ...] -> [B, H, N, L, ...]
        return x.reshape(*x.shape[:2], chunks, size, *x.shape[3:])

    q, k, v = split(query * key_dim**-0.5), split(key), split(value)  # the keys' scale, put on the queries
    log_input, log_forget = split(log_input), split(log_forget)  # [B, H, N, L]
    visible = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    if document is None:
        total = log_forget.cumsum(dim=-1)
    else:
        document = document.view(batch, chunks, size)
        visible = visible & (document[..., :, None] == document[..., None, :])  # [B, N, L, L]
        total = _sum_visible(visible, log_forget)
        visible = visible[:, None]
    relative = log_input - total  # log weight of token j at row p is total_p + relative_j

    incoming, incoming_scale, final = _chunk_states(k, v, relative, total[..., -1], document, state)

    # Inside the chunk.
    hidden_pairs = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, EMPTY)
    log_weight = relative[..., None, :] + hidden_pairs  # [B, H, N, L (p), L (j)], still without total_p
    before = total + incoming_scale[..., None]  # log weight of the incoming state at row p
    if document is not None:
        first = document[:, :1, 0]  # the very first chunk has nothing before it
        previous = torch.cat([first, document[:, :-1, -1]], dim=1)  # [B, N]
        before = before.masked_fill((document != previous[..., None])[:, None], EMPTY)
    with torch.no_grad():
        log_scale = torch.maximum(log_weight.amax(dim=-1) + total, before)  # m_p
    weight = (log_weight + (total - log_scale)[..., None]).exp()
    weight = weight * (q @ k.transpose(-1, -2))
    from_before = (q * (before - log_scale).exp()[..., None]) @ incoming
    both = (weight @ v + from_before).reshape(batch, heads, chunks * size, value_dim + 1)[:, :, :length]
    log_scale = log_scale.reshape(batch, heads, chunks * size)[..., :length]
    return readout(both[..., :-1], both[..., -1], log_scale), final


def _sum_visible(visible: Tensor, x: Tensor) -> Tensor:
    """Cumulative sum that starts anew in each document; visible bool [B, ..., L, L], x [B, H, ..., L].

    A masked sum and not a difference of two running sums, so that a document's sums do not depend, not even
    in the last bit, on the documents before it.
    """
    return torch.einsum("b...pl,bh...l->bh...p", visible.to(x.dtype), x)


def _chunk_states(
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    total: Tensor,
    document: Tensor | None,
    state: dict[str, Tensor] | None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The state before each chunk [B, H, N, d_m, d_v + 1] with its scale [B, H, N], and the state after the
    last.

    key [B, H, N, L, d_m] (not scaled: the scale sits on the queries, the returned state carries it); value
    [B, H, N, L, d_v + 1]; relative [B, H, N, L]; total [B, H, N]: the log forget gates summed over a chunk.
    """
    batch, heads, chunks, _, key_dim = key.shape
    columns = value.shape[-1]
    log_weight = relative + total[..., None]  # log weight of each token at its chunk's end
    if document is not None:
        other = document != document[..., -1:]
        log_weight = log_weight.masked_fill(other[:, None], EMPTY)
    local_scale = log_weight.detach().amax(dim=-1)  # [B, H, N]
    local_weight = (log_weight - local_scale[..., None]).exp()
    if document is not None:  # a chunk without any real token: EMPTY - EMPTY = 0; values are 0 there
        local_weight = local_weight.masked_fill(other[:, None], 0.0)
    local = key.transpose(-1, -2) @ (value * local_weight[..., None])  # [B, H, N, d_m, d_v + 1]
    local = local.reshape(batch, heads, chunks, key_dim * columns)

    if state is None:
        state = empty_state(batch, heads, key_dim, columns - 1, key)
    packed = torch.cat([state["memory"], state["normalizer"][..., None]], dim=-1) * key_dim**0.5
    carried, carried_scale = (
        packed.reshape(batch, heads, 1, -1),
        state["log_scale"].detach().double()[..., None],
    )
    end = None if document is None else document[..., -1]  # [B, N], document of the state after each chunk
    states, scales = [], []
    per_scan = CHUNKS_PER_SCAN.get(key.device.type, 256)
    for start in range(0, chunks, per_scan):
        stop = min(start + per_scan, chunks)
        # Entry 0 is the carried state, entry c the c-th chunk of this round.
        forgotten = F.pad(total[..., start:stop].double(), (1, 0))  # [B, H, count]
        entry_scale = torch.cat([carried_scale, local_scale[..., start:stop].double()], dim=-1)
        count = stop - start + 1
        visible = torch.ones(count, count, dtype=torch.bool, device=key.device).tril()
        if end is None:
            forgotten = forgotten.cumsum(dim=-1)
        else:
            documents = torch.cat([end[:, max(start - 1, 0)][:, None], end[:, start:stop]], dim=1)
            visible = visible & (documents[:, :, None] == documents[:, None, :])
            forgotten = _sum_visible(visible, forgotten)
            visible = visible[:, None]
        log_mix = forgotten[..., :, None] - forgotten[..., None, :] + entry_scale[..., None, :]
        log_mix = log_mix.masked_fill(~visible, EMPTY)
        scale = log_mix.detach().amax(dim=-1)  # [B, H, count]
        mix = ((log_mix - scale[..., None]).exp() * visible).to(key.dtype)
        after = mix @ torch.cat([carried, local[..., start:stop, :]], dim=2)
        states.append(after[..., :-1, :])
        scales.append(scale[..., :-1])
        carried, carried_scale = after[..., -1:, :], scale[..., -1:]
    incoming = torch.cat(states, dim=2).view(batch, heads, chunks, key_dim, columns)
    last = carried.view(batch, heads, key_dim, columns) * key_dim**-0.5
    final = {
        "memory": last[..., :-1],
        "normalizer": last[..., -1],
        "log_scale": carried_scale[..., 0].to(key.dtype),
    }
    return incoming, torch.cat(scales, dim=-1).to(key.dtype), final
