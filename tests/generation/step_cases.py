"""The step kernels beside the plain cache, on random queries, keys and values."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kvpop_lightning.cache import BoundedCache
from kvpop_lightning.cache.step_state import StepState, keeps_waiting
from kvpop_lightning.policy import Budget
from kvpop_lightning.policy.retention import RetentionPolicy


def make_policy(scorer: str, budget: Budget, *, layers: int, heads: int, dim: int, decay: float, **options):
    policy = RetentionPolicy.build(
        scorer, budget, scorer, num_layers=layers, num_heads=heads, head_dim=dim, hidden_size=8, decay=decay,
        decay_step=5, seed=3, **options,
    )  # fmt: skip
    with torch.no_grad():
        for one in policy.scorers:
            if hasattr(one, "output_weight"):
                one.output_weight.mul_(20)  # decisions not those of the decay alone
            elif one.kind == "linear":
                one.projection.key_weight.mul_(20)
            for name, buffer in one.named_buffers():
                if name.endswith("_mean"):
                    buffer.normal_(std=0.1)
                if name.endswith("_std"):
                    buffer.uniform_(0.5, 2.0)
    return policy


def compare_steps(
    policy, *, rows: int, group: int, dim: int, steps: int, prompt: int, dtype=torch.float32, device="cpu",
    ties: bool = False, splits: int = 0, block: int = 64, check_every: int = 1, seed: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Largest difference of the outputs, and steps after which a row held other positions than the plain
    cache's; row r has read `prompt + 7 r` tokens before."""
    from kvpop_lightning.cache.triton_step import Launch, StepKernels

    generator = torch.Generator().manual_seed(seed)
    layers, heads = policy.decay.shape
    policy = policy.to(device)
    if dtype == torch.float64:
        policy = policy.double()
    model = SimpleNamespace(kvpop=policy, config=SimpleNamespace(_attn_implementation="kvpop"))
    memory = policy.layer_scorer(0).init_state(1, device)
    state = StepState.empty(
        policy.budget, layers=layers, rows=rows, heads=heads, head_dim=dim, dtype=dtype, device=device,
        memory=memory, waiting=keeps_waiting(policy.layer_scorer(0), policy.budget),
    )  # fmt: skip
    if state.waiting.numel() and dtype == torch.float64:
        state.waiting = state.waiting.double()
    scale = dim**-0.5
    kernels = StepKernels(
        state,
        policy,
        query_heads=heads * group,
        scaling=scale,
        launch=Launch(splits=splits, block=block, scan=16),
    )

    def draw(count: int, tokens: int) -> torch.Tensor:
        x = torch.randn(layers, 1, count, tokens, dim, generator=generator)
        if ties:
            x = (x * 0.7).round().clamp(-1, 1)  # few values: equal keys, equal scores
        return x.to(device, dtype)

    def draw_hidden(tokens: int) -> torch.Tensor | None:
        """[L, 1, tokens, Hid]"""
        if not policy.needs_hidden:
            return None
        x = torch.randn(layers, 1, tokens, policy.layer_scorer(0).hidden_size, generator=generator)
        return x.to(device, dtype)

    def at_layer(hidden: torch.Tensor | None, layer: int) -> torch.Tensor | None:
        return None if hidden is None else hidden[layer]

    caches = []
    for row in range(rows):
        cache, length = BoundedCache(model), prompt + 7 * row
        if length:
            q, k, v = draw(heads * group, length), draw(heads, length), draw(heads, length)
            x = draw_hidden(length)
            cache.begin(1, length)
            for layer in range(layers):
                cache.update(k[layer], v[layer], layer)
                cache.attend(layer, q[layer], k[layer], v[layer], at_layer(x, layer), scale)
            state.take_over(row, cache)
        caches.append(cache)
    one = torch.ones(rows, dim, device=device, dtype=dtype)
    worst, wrong = 0.0, 0
    for step in range(steps):
        tokens = [(draw(heads * group, 1), draw(heads, 1), draw(heads, 1)) for _ in range(rows)]
        hidden = [draw_hidden(1) for _ in range(rows)]
        if ties and step % 3 == 0 and rows > 1:
            tokens[1] = tokens[0]
            hidden[1] = hidden[0]
        for cache in caches:
            cache.begin(1, 1)
        kernels.before_layers()
        for layer in range(layers):
            qkv = torch.stack(
                [torch.cat([x[layer, 0].reshape(-1) for x in (q, k, v)]) for q, k, v in tokens]
            ).contiguous()
            if kernels.hidden_weight is not None:
                x = torch.stack([one[layer, 0, 0] for one in hidden if one is not None])
                kernels.share[layer] = x.to(kernels.share.dtype) @ kernels.hidden_weight[layer].T
            out = torch.full((rows, heads * group * dim), torch.nan, device=device, dtype=dtype)
            kernels.attend(layer, qkv, one, one * 0, out, None, None)
            for row, (q, k, v) in enumerate(tokens):
                caches[row].update(k[layer], v[layer], layer)
                x = at_layer(hidden[row], layer)
                plain = caches[row].attend(layer, q[layer], k[layer], v[layer], x, scale).reshape(-1)
                worst = max(
                    worst, float((plain - out[row]).abs().max()) if not out[row].isnan().any() else 9e9
                )
        kernels.advance()
        if step % check_every == 0:
            for row, cache in enumerate(caches):
                left = min(
                    max(cache.tokens_seen - policy.budget.window - policy.budget.sink, 0), policy.budget.topk
                )
                same = all(
                    torch.equal(
                        state.position[i, row, :, :left].long(), cache.layers[i].position[0, :, :left]
                    )
                    for i in range(layers)
                )
                wrong += not same
    return {"worst": worst, "wrong": wrong}


SMALL = Budget(2, 5, 9)
