"""Scorers as modules: inputs, standardisation, delayed reads, decoding, stacking (METHOD.md, section 5)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvpop_lightning.policy.scorers import (
    LearnedScorer,
    Moments,
    Scorer,
    Tokens,
    build_scorer,
    call_stacked,
    projection,
    scorer_from_dict,
    scorer_types,
    stack_scorers,
    unstack_scorers,
)
from kvpop_lightning.policy.scorers.mlstm import MLSTMScorer
from kvpop_lightning.policy.scorers.mlstm_forms import mlstm_quadratic

HEADS, SIZE, HIDDEN, WINDOW = 3, 6, 10, 5
LEARNED = ("linear", "mlp", "mlstm")
INPUTS = ("kv", "hidden", "kv_hidden")


def make_scorer(kind: str, *, seed: int = 0, **options: Any) -> Scorer:
    """A float64 scorer with every parameter and statistic away from its start, so that each one matters."""
    g = torch.Generator().manual_seed(seed)
    options = {"width": 7, "memory_dim": 4, "value_dim": 3, "window": WINDOW} | options
    scorer = build_scorer(kind, num_heads=HEADS, head_dim=SIZE, hidden_size=HIDDEN, generator=g, **options)
    scorer = scorer.double()
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=g, dtype=torch.float64))
        if isinstance(scorer, MLSTMScorer):
            scorer.projection.bias[:, -1] = 1.0  # forget within reach of short rows
    shape = (HEADS, SIZE)
    scorer.set_standardization(
        *(torch.rand(shape, generator=g) + 0.5 for _ in range(4)),
        *(torch.rand(HIDDEN, generator=g) + 0.5 for _ in range(2)),
    )
    return scorer


def make_row(length: int, *, batch: int = 2, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    key = torch.randn(batch, HEADS, length, SIZE, generator=g, dtype=torch.float64)
    value = torch.randn(batch, HEADS, length, SIZE, generator=g, dtype=torch.float64)
    return key, value, torch.randn(batch, length, HIDDEN, generator=g, dtype=torch.float64)


def plain_inputs(scorer: Scorer, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
    """x_t [B, H, T, I], standardised, head by head."""
    p = scorer.projection
    assert not isinstance(p, Tensor)
    parts = []
    if scorer.inputs != "hidden":
        parts += [(key - p.key_mean[:, None]) / p.key_std[:, None]]
        parts += [(value - p.value_mean[:, None]) / p.value_std[:, None]]
    if scorer.inputs != "kv":
        parts += [((hidden - p.hidden_mean) / p.hidden_std)[:, None].expand(-1, HEADS, -1, -1)]
    return torch.cat(parts, dim=-1)


def plain_weight(scorer: Scorer) -> Tensor:
    p = scorer.projection
    assert not isinstance(p, Tensor)
    return torch.cat([getattr(p, f"{part}_weight") for part in p.parts], dim=1)  # [H, I, P]


def reference_score(
    scorer: Scorer, key: Tensor, value: Tensor, hidden: Tensor, ids: Tensor | None = None
) -> Tensor:
    """Every scorer written out: one head, and for mlstm one document, at a time."""
    batch, _, length, _ = key.shape
    x, weight = plain_inputs(scorer, key, value, hidden), plain_weight(scorer)
    score = torch.zeros(batch, HEADS, length, dtype=key.dtype)
    ids = torch.zeros(batch, length, dtype=torch.int64) if ids is None else ids
    for b, h in itertools.product(range(batch), range(HEADS)):
        out = x[b, h] @ weight[h] + scorer.projection.bias[h]
        if scorer.kind == "linear":
            score[b, h] = out[:, 0]
        elif scorer.kind == "mlp":
            score[b, h] = F.silu(out) @ scorer.output_weight[h] + scorer.output_bias[h]
        else:
            assert isinstance(scorer, MLSTMScorer)
            sizes = [scorer.memory_dim, scorer.width, scorer.memory_dim, scorer.value_dim, 1, 1]
            for document in ids[b].unique():
                rows = (ids[b] == document).nonzero()[:, 0]
                q, share, k, v, i, f = out[rows].split(sizes, dim=-1)
                for t in range(len(rows) - scorer.delay):
                    p = t + scorer.delay
                    query = q[t].expand(p + 1, -1)  # read at the last row only
                    h_p = mlstm_quadratic(
                        *(
                            y[None, None]
                            for y in (query, k[: p + 1], v[: p + 1], i[: p + 1, 0], f[: p + 1, 0])
                        )
                    )[0, 0, -1]
                    normed = h_p / torch.sqrt(h_p.square().mean() + 1e-5) * scorer.norm_gain[h]
                    inner = normed @ scorer.read_weight[h] + share[t]
                    score[b, h, rows[t]] = F.silu(inner) @ scorer.output_weight[h] + scorer.output_bias[h]
    return torch.where((ids >= 0)[:, None], score, torch.zeros_like(score))


PACKED = torch.tensor(
    [[-1, -1, 0, 0, 0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2, -1], [3] * 9 + [-1] * 3 + [3] * 6]
)


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("ids", [None, PACKED], ids=["one document", "packed"])
def test_forward_is_the_formula(kind: str, inputs: str, ids: Tensor | None) -> None:
    scorer = make_scorer(kind, inputs=inputs)
    row = make_row(18)
    torch.testing.assert_close(
        scorer(*row, document_ids=ids), reference_score(scorer, *row, ids), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("delay", [0, 3, WINDOW])
@pytest.mark.parametrize("where", ["start", "end", "middle"])
def test_delayed_read_with_padding_anywhere(delay: int, where: str) -> None:
    scorer = make_scorer("mlstm", delay=delay)
    pads = {"start": range(4), "end": range(14, 18), "middle": range(7, 11)}[where]
    ids = torch.zeros(2, 18, dtype=torch.int64)
    ids[1, 12:] = 1
    ids[:, list(pads)] = -1
    row = make_row(18)
    got = scorer(*row, document_ids=ids)
    torch.testing.assert_close(got, reference_score(scorer, *row, ids), rtol=1e-9, atol=1e-9)
    alone = [x[:, :, ids[0] >= 0] if x.dim() == 4 else x[:, ids[0] >= 0] for x in row]
    without = scorer(*alone, document_ids=ids[:, ids[0] >= 0])
    torch.testing.assert_close(got[:, :, ids[0] >= 0], without, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [1, 2, WINDOW, WINDOW + 1, 40])
def test_short_rows(length: int) -> None:
    scorer = make_scorer("mlstm")
    row = make_row(length)
    score = scorer(*row)
    torch.testing.assert_close(score, reference_score(scorer, *row), rtol=1e-9, atol=1e-9)
    assert (score[:, :, max(length - WINDOW, 0) :] == 0).all()
    assert (score[:, :, : max(length - WINDOW, 0)] != 0).all()


def test_delay_and_memory_matter() -> None:
    row = make_row(24)
    delayed, undelayed = make_scorer("mlstm"), make_scorer("mlstm", delay=0)
    undelayed.load_state_dict(delayed.state_dict())
    seen = delayed(*row)[:, :, : 24 - WINDOW]
    assert (seen - undelayed(*row)[:, :, : 24 - WINDOW]).abs().max() > 1e-3
    later = [x.clone() for x in row]
    later[0][:, :, 9] += 1.0  # key of token 9
    moved = (delayed(*later) - delayed(*row)).abs().amax(dim=(0, 1))
    assert (moved[: 9 - WINDOW] == 0).all(), "a token looked further ahead than its delay"
    assert (moved[9 - WINDOW : 24 - WINDOW] > 0).all(), "a token within reach did not look ahead or back"


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("inputs", INPUTS)
def test_gradients_reach_parameters_and_nothing_else(kind: str, inputs: str) -> None:
    scorer = make_scorer(kind, inputs=inputs)
    row = [x.requires_grad_() for x in make_row(18)]
    weight = torch.randn(2, HEADS, 18, dtype=torch.float64)
    (scorer(*row, document_ids=PACKED) * weight).sum().backward()
    fast = {name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None}
    assert fast.keys() == dict(scorer.named_parameters()).keys()
    assert all(x.grad is None for x in row)
    scorer.zero_grad()
    (reference_score(scorer, *make_row(18), PACKED) * weight).sum().backward()
    for name, parameter in scorer.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            fast[name], parameter.grad, rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )


def decode(
    scorer: Scorer, row: tuple[Tensor, Tensor, Tensor], lengths: list[int], pieces: list[list[int]]
) -> Tensor:
    """Feeds row b its tokens in pieces[b], as the cache does; scores by token, NaN = not scored."""
    key = row[0]
    batch, delay = key.shape[0], scorer.delay
    state = scorer.init_state(batch)
    score = torch.full(key.shape[:3], float("nan"), dtype=key.dtype)
    at = torch.zeros(batch, dtype=torch.int64)
    for sizes in zip(*pieces, strict=True):
        size = torch.tensor(sizes)
        columns = int(size.max())
        rows = at[:, None] + torch.arange(columns)
        assert bool((at + size <= torch.tensor(lengths)).all())
        new = gather_tokens(row, rows, torch.arange(columns) < size[:, None])
        before = at[:, None] - delay + torch.arange(delay)
        waiting = gather_tokens(row, before, before >= 0)
        got, state = scorer.extend(state, new, waiting if delay else None)
        assert got.shape == (batch, HEADS, columns)
        assert torch.isfinite(got).all()
        for b in range(batch):
            for c in range(columns):
                token = int(rows[b, c]) - delay
                if new.valid[b, c] and token >= 0:
                    score[b, :, token] = got[b, :, c]
        at = at + size
    return score


def gather_tokens(row: tuple[Tensor, Tensor, Tensor], rows: Tensor, valid: Tensor) -> Tokens:
    key, value, hidden = row
    index = rows.clamp(0, key.shape[2] - 1)
    per_head = index[:, None, :, None].expand(-1, HEADS, -1, SIZE)
    filler = (~valid).to(key.dtype) * 7.0  # whatever stands in filler must not matter
    return Tokens(
        key.gather(2, per_head) + filler[:, None, :, None],
        value.gather(2, per_head) - filler[:, None, :, None],
        hidden.gather(1, index[..., None].expand(-1, -1, HIDDEN)) + filler[..., None],
        rows.clamp(min=0),
        valid,
    )


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("delay", [0, 3, WINDOW])
def test_extend_equals_forward_for_any_chunking(kind: str, inputs: str, delay: int) -> None:
    if kind != "mlstm" and delay:
        pytest.skip("stateless")
    scorer = make_scorer(kind, inputs=inputs, delay=delay)
    length = 21
    row = make_row(length)
    expected = scorer(*row)[:, :, : length - delay]
    for pieces in ([21], [1] * 21, [7] * 3, [2, 9, 1, 1, 8], [20, 1], [1, 20]):
        got = decode(scorer, row, [length] * 2, [pieces] * 2)
        torch.testing.assert_close(got[:, :, : length - delay], expected, rtol=1e-9, atol=1e-9)
        assert got[:, :, length - delay :].isnan().all()


@pytest.mark.parametrize("kind", ["mlp", "mlstm"])
@pytest.mark.parametrize("delay", [0, 3, WINDOW])
def test_extend_with_ragged_rows(kind: str, delay: int) -> None:
    scorer = make_scorer(kind, inputs="kv_hidden", delay=delay)
    lengths = [21, 13]
    row = make_row(21)
    got = decode(scorer, row, lengths, [[1, 4, 0, 6, 1, 9], [6, 0, 1, 2, 0, 4]])
    for b, length in enumerate(lengths):
        expected = scorer(*(x[b : b + 1, :, :length] if x.dim() == 4 else x[b : b + 1, :length] for x in row))
        scored = length - scorer.delay
        torch.testing.assert_close(got[b, :, :scored], expected[0, :, :scored], rtol=1e-9, atol=1e-9)


def test_extend_without_its_state_or_delay_is_caught() -> None:
    scorer = make_scorer("mlstm")
    row = make_row(21)
    expected = scorer(*row)[:, :, : 21 - WINDOW]

    def forgetful(state: dict[str, Tensor], new: Tokens, waiting: Tokens | None) -> Any:
        score, _ = Scorer.extend(scorer, state, new, waiting)
        return score, scorer.init_state(2)

    scorer.extend = forgetful  # type: ignore[method-assign]
    got = decode(scorer, row, [21] * 2, [[7] * 3] * 2)[:, :, : 21 - WINDOW]
    assert (got - expected).abs().max() > 1e-3
    del scorer.extend
    scorer.delay = 0
    got = decode(scorer, row, [21] * 2, [[7] * 3] * 2)[:, :, : 21 - WINDOW]
    assert (got - expected).abs().max() > 1e-3


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("inputs", INPUTS)
def test_layers_stacked_along_heads_equal_layers_one_by_one(kind: str, inputs: str) -> None:
    layers = [make_scorer(kind, inputs=inputs, seed=seed) for seed in range(4)]
    rows = [make_row(18, seed=10 + seed) for seed in range(4)]
    key, value = (torch.cat([row[part] for row in rows], dim=1) for part in (0, 1))
    hidden = torch.stack([row[2] for row in rows], dim=1)  # [B, L, T, Hid]
    stacked = {name: x.requires_grad_(x.is_floating_point()) for name, x in stack_scorers(layers).items()}
    got = call_stacked(layers[0], stacked, key, value, hidden, document_ids=PACKED)
    one_by_one = torch.cat(
        [layer(*row, document_ids=PACKED) for layer, row in zip(layers, rows, strict=True)], dim=1
    )
    torch.testing.assert_close(got, one_by_one, rtol=1e-10, atol=1e-10)
    weight = torch.randn(got.shape, dtype=torch.float64)
    (got * weight).sum().backward()
    (one_by_one * weight).sum().backward()
    for name in dict(layers[0].named_parameters()):
        own = torch.cat([dict(layer.named_parameters())[name].grad for layer in layers])
        torch.testing.assert_close(stacked[name].grad, own, rtol=1e-8, atol=1e-8)
    fresh = [make_scorer(kind, inputs=inputs, seed=9) for _ in range(4)]
    unstack_scorers(fresh, {name: x.detach() for name, x in stacked.items()})
    for a, b in zip(fresh, layers, strict=True):
        for name, x in a.state_dict().items():
            assert torch.equal(x, b.state_dict()[name]), name


def test_stacking_refuses_scorers_that_differ() -> None:
    with pytest.raises(ValueError, match="alike"):
        stack_scorers([make_scorer("mlp"), make_scorer("mlp", width=8)])


@pytest.mark.parametrize("kind", LEARNED)
def test_scores_are_float32_under_autocast_and_from_half_precision(kind: str) -> None:
    scorer = make_scorer(kind, inputs="kv_hidden").float()
    row = tuple(x.bfloat16() for x in make_row(18))
    plain = scorer(*(x.float() for x in row))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = scorer(*row)
    assert under.dtype == torch.float32
    assert torch.equal(under, plain)


def test_float32_agrees_with_float64_and_with_decoding() -> None:
    scorer = make_scorer("mlstm")
    row = make_row(200)
    exact = scorer(*row)
    single = tuple(x.float() for x in row)
    scorer = scorer.float()
    torch.testing.assert_close(scorer(*single).double(), exact, rtol=1e-4, atol=1e-4)
    got = decode(scorer, single, [200] * 2, [[1] * 50 + [64, 64, 22]] * 2)
    torch.testing.assert_close(got[:, :, :-WINDOW], scorer(*single)[:, :, :-WINDOW], rtol=1e-4, atol=1e-4)


def test_standardisation_of_constant_channels_and_wrong_shapes() -> None:
    scorer = make_scorer("mlp", inputs="kv_hidden")
    std = torch.ones(HEADS, SIZE)
    std[:, 0] = 0.0
    scorer.set_standardization(key_mean=torch.zeros(HEADS, SIZE), key_std=std)
    assert torch.isfinite(scorer(*make_row(9))).all()
    with pytest.raises(ValueError, match=r"standardisation of hidden must have shape \(1, 10\)"):
        scorer.set_standardization(hidden_mean=torch.zeros(4), hidden_std=torch.ones(4))
    kept = make_scorer("mlp", seed=5)
    kept.load_state_dict(make_scorer("mlp").state_dict())
    assert torch.equal(kept(*make_row(9)), make_scorer("mlp")(*make_row(9))), "statistics are saved too"


def test_moments_are_those_of_all_tokens() -> None:
    key, _, hidden = make_row(18)
    valid = PACKED >= 0
    moments, wide = Moments(), Moments()
    for b in range(2):
        for part in (slice(0, 5), slice(5, 18)):
            moments.update(key[b : b + 1, :, part], valid[b : b + 1, part])
            wide.update(hidden[b : b + 1, part])
    seen = key.transpose(1, 2)[valid]  # [tokens, H, D]
    torch.testing.assert_close(moments.mean, seen.mean(dim=0))
    torch.testing.assert_close(moments.std, seen.std(dim=0, correction=0))
    torch.testing.assert_close(wide.std, hidden.flatten(0, 1).std(dim=0, correction=0))
    assert moments.count == int(valid.sum())


@pytest.mark.parametrize("kind", LEARNED)
def test_start_is_close_to_pure_decay_but_not_constant(kind: str) -> None:
    g = torch.Generator().manual_seed(0)
    scorer = build_scorer(kind, num_heads=3, head_dim=64, hidden_size=576, window=32, generator=g)
    key, value = torch.randn(2, 1, 3, 300, 64, generator=g)
    score = scorer(key, value)[:, :, :268]
    assert 0.02 < score.std() < 0.3
    again = build_scorer(
        kind, num_heads=3, head_dim=64, hidden_size=576, window=32, generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(again(key, value)[:, :, :268], score), "one seed, one start"


def test_parameter_counts_are_as_documented() -> None:
    size, width, d_m, d_v = 2 * SIZE + HIDDEN, 7, 4, 3
    columns = 2 * d_m + d_v + 2 + width
    for kind, per_head in (
        ("linear", size + 1),
        ("mlp", width * (size + 2) + 1),
        ("mlstm", (size + 1) * columns + d_v + d_v * width + width + 1),
    ):
        scorer = make_scorer(kind, inputs="kv_hidden")
        assert isinstance(scorer, LearnedScorer)
        assert scorer.parameter_count() == HEADS * per_head


@pytest.mark.parametrize("kind", [*LEARNED, "random", "key_norm", "streaming_llm", "oracle"])
def test_description_rebuilds_the_scorer(kind: str) -> None:
    scorer = make_scorer(kind, inputs="kv_hidden", layer=3, seed=4)
    twin = scorer_from_dict(scorer.to_dict()).double()
    twin.load_state_dict(scorer.state_dict())
    assert twin.to_dict() == scorer.to_dict()
    if kind != "oracle":
        assert torch.equal(twin(*make_row(18)), scorer(*make_row(18)))


def test_mistakes_name_the_key_and_the_fix() -> None:
    with pytest.raises(ValueError, match="did you mean mlstm"):
        make_scorer("mlsmt")
    with pytest.raises(ValueError, match=r"scorer\.inputs must be one of kv, hidden, kv_hidden"):
        make_scorer("mlp", inputs="key")
    with pytest.raises(ValueError, match=r"scorer\.delay 6 is longer than budget\.window 5"):
        make_scorer("mlstm", delay=WINDOW + 1)
    with pytest.raises(ValueError, match=r"scorer\.delay must be at least 0"):
        make_scorer("mlstm", delay=-1)
    with pytest.raises(ValueError, match=r"scorer\.width must be at least 1"):
        make_scorer("mlp", width=0)
    with pytest.raises(ValueError, match="needs the layer's hidden states"):
        make_scorer("mlp", inputs="hidden")(*make_row(4)[:2])
    assert {"linear", "mlp", "mlstm", "random", "key_norm", "streaming_llm", "oracle"} <= set(scorer_types())


@pytest.mark.parametrize("scorer", ["linear", "mlp", "mlstm"])
def test_a_product_in_pieces_is_the_product(scorer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows on a GPU: the same scores, and the same gradients up to their sum's order."""
    one = build_scorer(scorer, num_heads=2, head_dim=6, hidden_size=5, inputs="kv_hidden", window=4).double()
    key, value = torch.randn(2, 3, 2, 24, 6, dtype=torch.float64)
    hidden = torch.randn(3, 24, 5, dtype=torch.float64)
    found = []
    for pieces in (1, 4):
        monkeypatch.setattr(projection, "_pieces", lambda length, device, n=pieces: n)
        one.zero_grad()
        score = one(key, value, hidden, position=torch.arange(24).expand(3, -1), document_ids=None)
        score.sin().sum().backward()
        found.append([score.detach(), *(p.grad.clone() for p in one.parameters() if p.grad is not None)])
    assert len(found[0]) > 3
    for whole, cut in zip(*found, strict=True):
        torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-12)


def test_how_long_rows_are_cut() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert [projection._pieces(n, cuda) for n in (1, 1024, 2048, 32768, 32769, 3000)] == [1, 1, 2, 32, 1, 2]
    assert projection._pieces(32768, cpu) == 1
