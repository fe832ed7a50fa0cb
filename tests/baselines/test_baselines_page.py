"""docs/baselines.md: every policy and option is on it, its byte counts are true, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kvpop_lightning import BoundedCache, retrofit
from kvpop_lightning.baselines import available, build_policy, get, registry, retention_map
from kvpop_lightning.models import tiny_model
from kvpop_lightning.policy import Budget
from kvpop_lightning.policy.scorers import build, build_scorer

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "baselines.md").read_text()
SECTIONS = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))


def test_every_policy_has_its_section_and_its_configuration() -> None:
    names = [name for name in available() if not name.endswith("+decay")]
    assert sorted(SECTIONS) == sorted(names)
    for name in available():
        assert (ROOT / "configs" / "policy" / f"{name}.yaml").is_file(), name
        assert name.removesuffix("+decay") == name or f"`{name}`" in PAGE
    rules = [n for n in names if not get(n).trained]
    for name in rules:
        assert "Source:" in SECTIONS[name], name
        assert "Options:" in SECTIONS[name], name
        assert "Holds" in SECTIONS[name], name


def test_options_are_those_of_the_code() -> None:
    for name, text in SECTIONS.items():
        spec = get(name)
        if spec.scorer is None or spec.trained:
            continue
        for option in build._FACTORIES[spec.scorer][1]:
            assert option == "layer" or f"`{option}`" in text, f"{name}: {option}"


@pytest.mark.parametrize("name", [n for n in SECTIONS if re.search(r"(\d+) bytes per slot and", SECTIONS[n])])
def test_stated_slot_bytes(name: str) -> None:
    number, share = re.search(r"(\d+) bytes per slot and (layer|KV\s+head)", SECTIONS[name]).groups()  # type: ignore[union-attr]
    heads = 5
    rule = build_scorer(name, num_heads=heads, head_dim=4, hidden_size=2)
    assert rule.slot_bytes() == int(number) * (1 if share == "layer" else heads)
    if name == "expected_attention":
        assert rule.text_bytes() == heads * 4 * (4 + 4**2) + 8
    else:
        assert rule.text_bytes() == 0


def test_the_example_is_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten lines, one file: budgets, cache, parallel form and map work with it."""
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    monkeypatch.setattr(build, "_FACTORIES", dict(build._FACTORIES))
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL).group(1)  # type: ignore[union-attr]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    exec(compile(code, "value_norm.py", "exec"), {"__name__": "value_norm"})
    assert "value_norm" in available()
    budget = Budget(1, 2, 4)
    model = retrofit(tiny_model("llama", dtype=torch.float64), budget, policy="value_norm").double()
    ids = torch.randint(3, 272, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = BoundedCache(model)
        steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(30)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-8, rtol=0)
    assert model.generate(ids, max_new_tokens=3, min_new_tokens=3).shape == (1, 33)
    key, value = torch.randn(2, 1, 2, 20, 4, generator=torch.Generator().manual_seed(1))
    seen = retention_map("value_norm", key, key, value, budget=budget)
    norms = value[0, 0].norm(dim=-1)
    best = norms[1:18].topk(4).indices + 1
    assert set(seen[0, 0, -1].nonzero()[:, 0].tolist()) == {0, 18, 19, *best.tolist()}


def test_parameters_side_by_side_are_those_of_the_code() -> None:
    """On SmolLM2's shapes; a matched gate has within one percent as many as the MLP scorer."""
    stated = {
        name.strip(): int(number.replace(",", ""))
        for names, number in re.findall(r"^\| (.+?) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
        for name in re.sub(r"\(.*?\)", "", names).split(", ")
    }

    def count(name: str, **options) -> int:
        policy = build_policy(
            name,
            Budget(4, 32, 92),
            num_layers=30,
            num_heads=3,
            head_dim=64,
            hidden_size=576,
            **{"inputs": "kv_hidden", "width": 64} | options,
        )
        return sum(parameter.numel() for parameter in policy.parameters())

    found = {
        "kvpop_linear": count("kvpop_linear"),
        "kvpop_mlp": count("kvpop_mlp"),
        "kvpop_mlstm": count("kvpop_mlstm", inputs="kv", memory_dim=8, value_dim=8),
        "dms": count("dms", gate_width=None),
        "retention_gate": count("retention_gate", gate_width=None),
        "dms as its authors": count("dms", gate_width=0),
        "dmc": count("dmc", gate_width=None),
        "dmc as a linear map": count("dmc", gate_width=0),
    }
    assert {name: stated[name] for name in found} == found
    assert found["dms"] == found["retention_gate"] == pytest.approx(found["kvpop_mlp"], rel=0.01)
    assert found["dmc"] == pytest.approx(found["kvpop_mlp"], rel=0.01)


def test_bytes_of_a_stateless_policy() -> None:
    """4 D per slot, 12 per long-range slot, 4 per window slot, per KV head."""
    policy = build_policy("random", Budget(2, 5, 7), num_layers=1, num_heads=3, head_dim=8, hidden_size=4)
    assert policy.bytes_per_sequence() == 3 * (14 * 4 * 8 + 7 * 12 + 5 * 4)
