"""The step kernels and the fused step on a GPU: the plain cache's positions, the library's logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize(
    ("scorer", "group", "ties", "options"),
    [
        ("mlp", 1, False, {"width": 16}),
        ("mlp", 3, True, {"width": 16}),
        ("mlstm", 4, False, {"memory_dim": 8, "value_dim": 16, "width": 16}),
        ("mlstm", 3, False, {"memory_dim": 8, "value_dim": 16, "width": 16, "delay": 5}),
        ("mlp", 4, False, {"width": 16, "inputs": "kv_hidden"}),
        ("mlp", 2, False, {"width": 20, "inputs": "hidden"}),
        ("linear", 3, True, {"inputs": "kv_hidden"}),
        ("streaming_llm", 4, True, {}),
    ],
)
def test_steps_equal_the_plain_cache(scorer: str, group: int, ties: bool, options: dict[str, Any]) -> None:
    from step_cases import compare_steps, make_policy

    from kvpop_lightning.policy import Budget

    decay = 1.0 if scorer == "streaming_llm" else 0.8
    policy = make_policy(scorer, Budget(3, 16, 60), layers=1, heads=2, dim=32, decay=decay, **options)
    with torch.no_grad():
        found = compare_steps(
            policy,
            rows=3,
            group=group,
            dim=32,
            steps=150,
            prompt=40,
            device="cuda",
            ties=ties,
            splits=3,
            block=32,
        )
    assert found["wrong"] == 0
    assert found["worst"] < 1e-5


@pytest.mark.parametrize(
    ("family", "inputs"),
    [("llama", "kv"), ("qwen3", "kv"), ("mistral", "kv"), ("qwen3", "kv_hidden"), ("llama", "hidden")],
)
@pytest.mark.parametrize("slots", [1, 2])
def test_engine_on_the_graph_equals_the_plain_path(family: str, inputs: str, slots: int) -> None:
    from kvpop_lightning import retrofit
    from kvpop_lightning.generation import Engine, Sampling
    from kvpop_lightning.models.tiny import tiny_model
    from kvpop_lightning.policy import Budget

    model = retrofit(
        tiny_model(family, head_dim=32, hidden_size=96).cuda(), Budget(2, 8, 30), scorer="mlp", inputs=inputs
    )
    prompts = [list(range(5, 5 + n)) for n in (3, 60, 17)]
    settings = Sampling(max_new_tokens=40, ignore_eos=True)
    plain, graph = (
        Engine(model, slots=slots, backend=backend).generate(prompts, settings)
        for backend in ("plain", "graph")
    )
    assert [row[0].tokens for row in graph] == [row[0].tokens for row in plain]
