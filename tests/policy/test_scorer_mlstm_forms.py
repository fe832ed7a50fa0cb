"""The mLSTM's three forms agree: definition (float64), recurrence, chunks (METHOD.md, section 5)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpop_lightning.policy.scorers import mlstm_chunkwise as chunkwise_module
from kvpop_lightning.policy.scorers.mlstm_chunkwise import mlstm_chunkwise
from kvpop_lightning.policy.scorers.mlstm_forms import empty_state, mlstm_quadratic, mlstm_recurrent


def make_inputs(
    length: int, *, batch: int = 2, heads: int = 3, key_dim: int = 5, value_dim: int = 4, seed: int = 0
) -> tuple[Tensor, ...]:
    """query, key, value, input gate, forget gate, float64, gates over a wide range."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return (
        normal(batch, heads, length, key_dim),
        normal(batch, heads, length, key_dim),
        normal(batch, heads, length, value_dim),
        3 * normal(batch, heads, length),
        2 + 3 * normal(batch, heads, length),
    )


def make_documents(length: int, kind: str, batch: int = 2, seed: int = 0) -> Tensor | None:
    g = torch.Generator().manual_seed(seed)
    if kind == "none":
        return None
    starts = torch.rand(batch, length, generator=g) < 0.15
    ids = starts.long().cumsum(dim=1)
    if kind == "left":
        ids[0, : length // 3] = -1
    elif kind == "right":
        ids[0, length - length // 3 :] = -1
    elif kind == "holes":
        ids[torch.rand(batch, length, generator=g) < 0.3] = -1
    return ids


def by_hand(inputs: tuple[Tensor, ...], ids: Tensor | None) -> Tensor:
    """The recurrence of METHOD.md without stabiliser, in plain Python loops."""
    q, k, v, i_gate, f_gate = inputs
    batch, heads, length, key_dim = q.shape
    out = torch.zeros(batch, heads, length, v.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            current = None
            memory, normalizer = torch.zeros(key_dim, v.shape[-1]).double(), torch.zeros(key_dim).double()
            for t in range(length):
                document = 0 if ids is None else int(ids[b, t])
                if document >= 0:
                    if document != current:
                        memory, normalizer, current = memory * 0, normalizer * 0, document
                    f, i = torch.sigmoid(f_gate[b, h, t]), torch.exp(i_gate[b, h, t])
                    key = k[b, h, t] / math.sqrt(key_dim)
                    memory = f * memory + i * torch.outer(key, v[b, h, t])
                    normalizer = f * normalizer + i * key
                denominator = max(abs(float(normalizer @ q[b, h, t])), 1.0)
                out[b, h, t] = memory.T @ q[b, h, t] / denominator
    return out


def real(h: Tensor, ids: Tensor | None) -> Tensor:
    return h if ids is None else h.transpose(1, 2)[ids >= 0]


@pytest.mark.parametrize("kind", ["none", "documents", "left", "right", "holes"])
def test_definition_is_the_recurrence_of_the_method(kind: str) -> None:
    inputs, ids = make_inputs(23), make_documents(23, kind)
    torch.testing.assert_close(
        real(mlstm_quadratic(*inputs, document_ids=ids), ids),
        real(by_hand(inputs, ids), ids),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("length", [1, 2, 7, 63, 64, 65, 130])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("kind", ["none", "documents", "left", "right", "holes"])
def test_chunks_equal_definition(length: int, chunk: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        chunkwise_module, "CHUNKS_PER_SCAN", {"cpu": 5}
    )  # several rounds of the scan even in short rows
    inputs, ids = make_inputs(length), make_documents(length, kind)
    expected = mlstm_quadratic(*inputs, document_ids=ids)
    got, _ = mlstm_chunkwise(*inputs, document_ids=ids, chunk=chunk)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(real(got, ids), real(expected, ids), rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 40),
    chunk=st.integers(1, 12),
    kind=st.sampled_from(["none", "documents", "holes"]),
    seed=st.integers(0, 10_000),
)
def test_chunks_equal_definition_on_random_sizes(length: int, chunk: int, kind: str, seed: int) -> None:
    inputs, ids = make_inputs(length, seed=seed), make_documents(length, kind, seed=seed)
    got, _ = mlstm_chunkwise(*inputs, document_ids=ids, chunk=chunk)
    expected = mlstm_quadratic(*inputs, document_ids=ids)
    torch.testing.assert_close(real(got, ids), real(expected, ids), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["none", "documents", "holes"])
def test_gradients_equal_those_of_the_definition(kind: str) -> None:
    ids = make_documents(45, kind)
    plain = [x.requires_grad_() for x in make_inputs(45)]
    fast = [x.requires_grad_() for x in make_inputs(45)]
    weight = torch.randn(2, 3, 45, 4, dtype=torch.float64)
    if ids is not None:
        weight = weight * (ids >= 0)[:, None, :, None]
    (mlstm_quadratic(*plain, document_ids=ids) * weight).sum().backward()
    (mlstm_chunkwise(*fast, document_ids=ids, chunk=8)[0] * weight).sum().backward()
    for name, a, b in zip(("q", "k", "v", "i", "f"), plain, fast, strict=True):
        assert a.grad is not None
        assert a.grad.abs().max() > 1e-3, f"vacuous gradient of {name}"
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


def start(inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    q, _, v = inputs[:3]
    return empty_state(q.shape[0], q.shape[1], q.shape[3], v.shape[3], q)


@pytest.mark.parametrize("pieces", [[23], [1] * 23, [7, 7, 7, 2], [1, 15, 7]])
@pytest.mark.parametrize("form", [mlstm_recurrent, mlstm_chunkwise])
def test_state_carries_a_row_cut_in_pieces(pieces: list[int], form) -> None:  # type: ignore[no-untyped-def]
    inputs = make_inputs(23)
    expected = mlstm_quadratic(*inputs)
    state, outputs, at = start(inputs), [], 0
    for size in pieces:
        h, state = form(*(x[:, :, at : at + size] for x in inputs), state=state)
        outputs.append(h)
        at += size
    torch.testing.assert_close(torch.cat(outputs, dim=2), expected, rtol=1e-9, atol=1e-9)


def test_both_stateful_forms_leave_the_same_state_and_padding_leaves_none() -> None:
    inputs = make_inputs(12)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[0, 5:] = False
    valid[1] = False
    _, a = mlstm_recurrent(*inputs, state=start(inputs), valid=valid)
    _, b = mlstm_chunkwise(*inputs, state=start(inputs), valid=valid, chunk=5)
    _, short = mlstm_recurrent(*(x[:1, :, :5] for x in inputs), state=empty_state(1, 3, 5, 4, inputs[0]))
    for name, fresh in start(inputs).items():
        torch.testing.assert_close(b[name], a[name], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(a[name][:1], short[name], rtol=0, atol=0)
        torch.testing.assert_close(a[name][1], fresh[1], rtol=0, atol=0)
        torch.testing.assert_close(b[name][1], fresh[1], rtol=0, atol=0)


def test_chunkwise_goes_on_from_a_recurrent_state_with_ragged_rows() -> None:
    inputs = make_inputs(20)
    expected = mlstm_quadratic(*inputs)
    # Row 0 takes 3 tokens of the first piece and row 1 takes 8; each then goes on with its own next tokens.
    taken = torch.tensor([3, 8])
    valid = torch.arange(8)[None] < taken[:, None]
    _, state = mlstm_chunkwise(*(x[:, :, :8] for x in inputs), state=start(inputs), valid=valid, chunk=3)
    rows = taken[:, None] + torch.arange(12)[None]
    inside = rows < 20

    def pick(x: Tensor) -> Tensor:
        index = rows.clamp(max=19).view(2, 1, 12, *([1] * (x.dim() - 3))).expand(-1, 3, -1, *x.shape[3:])
        return x.gather(2, index)

    h, _ = mlstm_chunkwise(*(pick(x) for x in inputs), state=state, valid=inside, chunk=5)
    got, want = h.transpose(1, 2)[inside], pick(expected).transpose(1, 2)[inside]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("forget", [0.5, 3.0, 7.0])
@pytest.mark.parametrize("packed", [False, True])
def test_float32_holds_over_6000_tokens(forget: float, packed: bool) -> None:
    length, second = 6000, 5300
    inputs = make_inputs(length, batch=1, heads=1, key_dim=4, value_dim=3)
    inputs = (*inputs[:4], inputs[4] * 0.3 + forget)
    ids = torch.zeros(1, length, dtype=torch.int64) if packed else None
    if ids is not None:
        ids[:, second:] = 1
    h64, _ = mlstm_chunkwise(*inputs, document_ids=ids)
    h32, _ = mlstm_chunkwise(*(x.float() for x in inputs), document_ids=ids)
    if packed:
        exact = mlstm_quadratic(*(x[:, :, second:] for x in inputs))
        torch.testing.assert_close(h64[:, :, second:], exact, rtol=1e-8, atol=1e-8)
    error = (h32.double() - h64).abs() / (1 + h64.abs())
    for rows in (slice(4000, second), slice(second, None)):
        assert error[:, :, rows].median() < 5e-7
        # Rows whose normaliser nearly cancels are ill-conditioned in any form.
        assert error[:, :, rows].quantile(0.99) < 5e-5


def test_extreme_gates_stay_finite() -> None:
    q, k, v, i, f = make_inputs(40)
    for scale_i, scale_f in ((100.0, 0.0), (-200.0, 0.0), (0.0, -300.0), (0.0, 300.0), (100.0, -300.0)):
        parts = [x.float().requires_grad_() for x in (q, k, v, i + scale_i, f + scale_f)]
        ids = make_documents(40, "holes")
        h, _ = mlstm_chunkwise(*parts, document_ids=ids, chunk=7)
        assert torch.isfinite(h).all()
        h.sum().backward()
        for x in parts:
            assert x.grad is not None
            assert torch.isfinite(x.grad).all()


def test_documents_and_padding_do_not_leak() -> None:
    inputs = make_inputs(30, batch=1)
    ids = torch.tensor([[-1] * 4 + [0] * 11 + [-1] * 2 + [1] * 10 + [-1] * 3])
    changed = tuple(x.clone() for x in inputs)
    for x in changed:
        x[:, :, 4:15] += 1.0  # document 0
        x[:, :, ids[0] < 0] = 9.0  # padding
    before, _ = mlstm_chunkwise(*inputs, document_ids=ids, chunk=6)
    after, _ = mlstm_chunkwise(*changed, document_ids=ids, chunk=6)
    torch.testing.assert_close(after[:, :, ids[0] == 1], before[:, :, ids[0] == 1], rtol=0, atol=0)
    assert not torch.allclose(after[:, :, ids[0] == 0], before[:, :, ids[0] == 0])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["none", "documents", "holes"])
def test_long_rows_on_a_gpu_equal_the_definition_with_gradients(kind: str) -> None:
    """float32 over more than one round of the scan, against float64."""
    length = 64 * 256 + 300
    inputs = make_inputs(length, batch=1, heads=1, key_dim=16, value_dim=32)
    ids = make_documents(length, kind, batch=1)
    if ids is not None:
        ids = torch.where(ids < 0, ids, ids // 300).cuda()  # some long documents
    weight = torch.randn(1, 1, length, 32, dtype=torch.float64).cuda()
    if ids is not None:
        weight = weight * (ids >= 0)[:, None, :, None]
    results = []
    for dtype in (torch.float64, torch.float32):
        leaves = [x.to("cuda", dtype).requires_grad_() for x in inputs]
        if dtype == torch.float64:
            h = mlstm_quadratic(*leaves, document_ids=ids)
        else:
            h, _ = mlstm_chunkwise(*leaves, document_ids=ids, chunk=64)
        (h * weight.to(dtype)).sum().backward()
        results.append([(h * weight.to(dtype)).detach(), *(x.grad for x in leaves)])
    for exact, fast in zip(*results, strict=True):
        assert (fast.double() - exact).norm() < 1e-3 * exact.norm()
