"""`retention_map` against plain float64 loops: the same keys at every query, for every rule."""

from __future__ import annotations

import pytest
import torch
from rule_loops import STATIC, STEPWISE, plain_map, texts_of
from torch import Tensor

from kvpop_lightning.baselines import available, build_policy, get, retention_map
from kvpop_lightning.policy import Budget, position_in_document
from kvpop_lightning.policy.scorers import build_scorer
from kvpop_lightning.policy.stepwise import Held

DIM = 6
INV_FREQ = [1.0, 0.3, 0.05]
OPTIONS = {
    "attention_ema": {"averaging": 0.8},
    "snapkv": {"prompt_length": 14, "observed": 4, "pool": 3},
    "expected_attention": {"future": 7, "skip": 2, "inv_freq": INV_FREQ},
}


def tensors(group: int, *, length: int = 26, heads: int = 2, seed: int = 0, kind: str = "normal"):
    """query, key, value [2, .., length, DIM] float64."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(2, n, length, DIM, generator=g, dtype=torch.float64)  # noqa: E731
    query, key, value = 2 * draw(heads * group), draw(heads), draw(heads)
    if kind == "ties":  # few different tokens, whole numbers: equal keys, equal norms, equal logits
        which = torch.randint(0, 4, (length,), generator=g)
        query, key, value = (x.round()[:, :, which] for x in (query, key, value))
    if kind == "flat":  # all keys are attended alike
        query = torch.zeros_like(query)
    return query, key, value


def layouts(length: int = 26) -> dict[str, Tensor | None]:
    packed = torch.zeros(2, length, dtype=torch.int64)
    packed[0, 11:] = 1
    packed[0, 12:] = 2
    packed[1, :3], packed[1, -2:], packed[1, 9] = -1, -1, -1
    packed[1, 15:-2] = 5
    left = torch.zeros(2, length, dtype=torch.int64)
    left[1, :9] = -1
    return {"whole": None, "packed": packed, "padded": left}


def positions(ids: Tensor | None) -> Tensor:
    return position_in_document(ids, batch=2, length=26)


def check(name: str, query, key, value, budget: Budget, ids: Tensor | None, **options) -> Tensor:
    scores = None
    reference = dict(options)
    heads = key.shape[1]
    if name in STATIC:
        decay = {"decay": 0.6, "decay_step": 3} if name.endswith("+decay") else {}
        policy = build_policy(
            name, budget, num_layers=1, num_heads=heads, head_dim=DIM, hidden_size=1, seed=4, **decay
        )
        scores = (
            torch.randn(key.shape[:3], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            if name == "oracle"
            else policy.score(0, key, value, None, position=positions(ids), document_ids=ids)
        )
        if name.startswith("key_norm"):
            real = slice(None) if ids is None else (ids >= 0)[:, None].expand_as(scores)
            torch.testing.assert_close(scores[real], -key.square().sum(-1).sqrt()[real])
        options |= {"policy": policy} | ({"scores": scores} if name == "oracle" else {})
        reference = {"gamma": decay.get("decay", 1.0), "step": decay.get("decay_step", 1)}
    got = retention_map(name, query, key, value, budget=budget, document_ids=ids, **options)
    expected = plain_map(name, query, key, value, budget, ids, scores=scores, **reference)
    wrong = (got != expected).nonzero()
    assert not len(wrong), f"{name}: {len(wrong)} entries differ, first {wrong[0].tolist()}"
    after = OPTIONS["snapkv"]["prompt_length"] if name == "snapkv" else 0  # a prompt is exempt
    late = (
        torch.arange(26) >= after
        if ids is None
        else positions(ids)[:, None, :].expand(*got.shape[:3]) >= after
    )
    assert int((got.sum(-1) * late).max()) <= budget.total
    return got


@pytest.mark.parametrize("name", [*STATIC, *STEPWISE])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_every_rule_is_its_plain_loop(name: str, group: int) -> None:
    """Groups 1, 3 and 4; whole rows, packed documents, padding left, right and inside."""
    for seed, (layout, ids) in enumerate(layouts().items()):
        query, key, value = tensors(group, seed=10 * group + seed)
        budget = [Budget(2, 3, 4), Budget(0, 2, 3), Budget(1, 4, 2)][seed]
        seen = check(name, query, key, value, budget, ids, **OPTIONS.get(name, {}))
        if layout == "whole":
            assert int(seen[0, 0, -1].sum()) == budget.total
            # Positional rules, and H2O's old heavy hitters, may well choose alike in two texts.
            assert not torch.equal(seen[0, 0], seen[1, 0]) or name.startswith(("streaming", "random", "h2o"))


@pytest.mark.parametrize(
    ("name", "kind"),
    # Where values are equal up to rounding alone (covariances, pooled sums), a tie says nothing.
    [
        (n, k)
        for n in (*STATIC, *STEPWISE)
        for k in ("ties", "flat")
        if n not in ("expected_attention", "snapkv") or k == "flat"
    ],
)
def test_ties(name: str, kind: str) -> None:
    """Whole numbers and few different tokens; among equals the oldest goes."""
    query, key, value = tensors(2, seed=3, kind=kind)
    check(name, query, key, value, Budget(1, 2, 4), None, **OPTIONS.get(name, {}))


def fading_loop(log_beta: list[float], budget: Budget) -> list[set[int]]:
    """One head's text under retention gates: at query i the key of lowest `beta_j ** (i - j)` goes, the
    oldest of equals, once B are held; the first tokens and the next query's window are spared.
    """
    held: list[int] = []
    sees = []
    for i in range(len(log_beta)):
        held.append(i)
        sees.append(set(held))
        if len(held) == budget.total:
            free = [j for j in held if j >= budget.sink and i + 1 - j >= budget.window]
            held.remove(min(free, key=lambda j: ((i - j) * log_beta[j], j)))
    return sees


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_retention_gates_are_their_plain_loop(heads: int, kind: str) -> None:
    """Rates that differ, so that the order changes with age, and rates whose products meet exactly."""
    g = torch.Generator().manual_seed(heads)
    changed = 0
    for seed, ids in enumerate(layouts().values()):
        budget = [Budget(2, 3, 4), Budget(0, 2, 3), Budget(1, 4, 2)][seed]
        rate = -torch.rand(2, heads, 26, generator=g, dtype=torch.float64)
        if kind == "ties":
            rate = -torch.tensor([0.25, 0.5, 1.0, 0.0]).double()[
                torch.randint(0, 4, (2, heads, 26), generator=g)
            ]
        policy = build_policy(
            "retention_gate", budget, num_layers=1, num_heads=heads, head_dim=DIM, hidden_size=3
        )
        policy.layer_scorer(0).log_beta = lambda hidden, rate=rate: rate
        query, key, value = tensors(3, heads=heads)
        got = retention_map(
            "retention_gate", query, key, value, budget=budget, document_ids=ids, policy=policy,
            hidden=torch.zeros(2, 26, 3),
        )  # fmt: skip
        expected = torch.zeros_like(got)
        for row, columns in texts_of(ids, 2, 26):
            for h in range(heads):
                for i, attended in enumerate(fading_loop(rate[row, h, columns].tolist(), budget)):
                    expected[row, h, columns[i], [columns[j] for j in attended]] = True
        assert torch.equal(got, expected)
        changed += int((got.sum(-1) == budget.total).sum())
    assert changed > 50, "the budget must be reached"


@pytest.mark.parametrize("name", ["tova", "tova_head"])
def test_equal_attention_is_a_sliding_window(name: str) -> None:
    query, key, value = tensors(2, kind="flat")
    seen = retention_map(name, query, key, value, budget=Budget(0, 2, 5))
    place = torch.arange(26)
    window = (place[:, None] >= place) & (place[:, None] - place < 7)
    assert torch.equal(seen, window.expand_as(seen))


def test_layer_wide_means_the_same_positions_in_all_heads() -> None:
    query, key, value = tensors(3, heads=4)
    budget = Budget(0, 2, 6)
    together = retention_map("tova", query, key, value, budget=budget)
    apart = retention_map("tova_head", query, key, value, budget=budget)
    assert torch.equal(together, together[:, :1].expand_as(together))
    assert not torch.equal(apart, apart[:, :1].expand_as(apart))


def test_h2o_favours_the_old_and_its_mean_does_not() -> None:
    """The known defect: 15 queries gave key 0 0.15 each, 6 gave key 9 0.2 each; the sum drops key 9."""
    position = torch.tensor([[[0, 9]]])
    note = {"attention": torch.tensor([[[15 * 0.15, 6 * 0.2]]])}
    held = Held(torch.zeros(1, 1, 2, DIM), torch.zeros(1, 1, 2, DIM), position, note)
    newest = torch.tensor([14])
    for name, dropped in (("h2o", 1), ("h2o_mean", 0)):
        rule = build_scorer(name, num_heads=1, head_dim=DIM, hidden_size=1)
        assert int(rule.value_of(held, newest).argmin()) == dropped


def test_common_promises_of_every_policy() -> None:
    """No query sees more than the budget, its own future, another document, or padding; dropped stays
    dropped."""
    query, key, value = tensors(3, seed=8)
    hidden = torch.randn(2, 26, 5, dtype=torch.float64)
    budget = Budget(1, 3, 4)
    for name in available():
        if get(name).merges:  # no map: tests/baselines/test_dmc.py
            continue
        for ids in layouts().values():
            seen = retention_map(
                name, query, key, value, budget=budget, document_ids=ids, hidden=hidden,
                **({"decay": 0.5, "decay_step": 4} if get(name).uses_decay else {}),
            )  # fmt: skip
            assert seen.shape == (2, 2, 26, 26)
            assert seen.dtype == torch.bool
            assert not seen.triu(1).any()
            own = seen.diagonal(dim1=-2, dim2=-1)
            real = torch.ones(2, 26, dtype=torch.bool) if ids is None else ids >= 0
            assert torch.equal(own, real[:, None].expand_as(own))
            if ids is not None:
                assert not (seen & (ids[:, :, None] != ids[:, None])[:, None]).any()
                assert not seen[~real[:, None].expand_as(own)].any()
            if name == "full":
                continue
            if name not in (
                "snapkv",
                "dms",
            ):  # 26 tokens are all prompt; its gates bound the mean, not the count
                assert int(seen.sum(-1).max()) <= budget.total
            if name == "quest":  # chooses anew for every query, from a cache that keeps everything
                continue
            returns = seen[:, :, 1:] & ~seen[:, :, :-1] & (torch.arange(26) <= torch.arange(25)[:, None])
            at_rest = real[:, 1:] & real[:, :-1]
            assert not (returns & at_rest[:, None, :, None]).any(), name


def test_total_as_budget_and_refusals() -> None:
    query, key, value = tensors(1)
    assert int(retention_map("tova", query, key, value, budget=9)[0, 0, -1].sum()) == 9
    assert int(retention_map("streaming_llm", query, key, value, budget=9)[0, 0, -1].sum()) == 9
    with pytest.raises(ValueError, match="at least 2 keys"):
        retention_map("tova", query, key, value, budget=1)
    with pytest.raises(ValueError, match="did you mean tova"):
        retention_map("tvoa", query, key, value, budget=9)
    with pytest.raises(ValueError, match="'averagin'; it takes averaging"):
        retention_map("attention_ema", query, key, value, budget=9, averagin=0.5)
    with pytest.raises(ValueError, match="multiple"):
        retention_map("tova", query.repeat(1, 2, 1, 1)[:, :3], key, value, budget=9)
    with pytest.raises(ValueError, match="reads hidden states"):
        retention_map("kvpop_mlp", query, key, value, budget=9, inputs="hidden")


def test_inputs_that_do_not_fit_are_refused() -> None:
    query, key = torch.randn(1, 2, 30, 4), torch.randn(1, 1, 30, 4)
    falls = torch.tensor([[0] * 10 + [1] * 10 + [0] * 10])
    with pytest.raises(ValueError, match="document_ids must not fall within a row"):
        retention_map("h2o", query, key, key, budget=11, document_ids=falls)
    padded = torch.tensor([[-1] * 5 + [0] * 10 + [-1] * 5 + [1] * 10])
    assert retention_map("h2o", query, key, key, budget=11, document_ids=padded).any()
    with pytest.raises(ValueError, match=r"hidden must be \[1, 30, Hid\]"):
        retention_map("dms", query, key, key, budget=11, hidden=torch.randn(1, 29, 16))
    for budget in (10.5, "10", None):
        with pytest.raises(ValueError, match="budget must be Budget"):
            retention_map("h2o", query, key, key, budget=budget)  # type: ignore[arg-type]
