"""A Llama, Qwen3 or Mistral decoder's step, hand-fused around the step kernels of the bounded cache.

One token per row through the whole model in static shapes: five launches a layer for one row, eight for
several. The weights are the model's own (q, k, v and gate, up are laid side by side once, and the model's
parameters become views of that). Checked against the library's logits (tests/generation/test_fused.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from kvpop_lightning.cache.step_state import StepState
from kvpop_lightning.cache.triton_step import Launch, StepKernels
from kvpop_lightning.generation.triton_linear import gated_kernel, norm_rows, silu_rows, vector_kernel
from kvpop_lightning.models.context import decoder_of

FAMILIES = ("llama", "qwen3", "mistral")


def fused_refusal(model: Any) -> str | None:
    """Why this model cannot take the fused step; None when it can."""
    config = model.config
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type} has no fused step ({', '.join(FAMILIES)} have)"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"hidden_act={config.hidden_act} has no fused step"
    rope = getattr(decoder_of(model).rotary_emb, "rope_type", "default")
    if "dynamic" in rope or rope == "longrope":
        return f"rope_type={rope} changes with the length"
    decoder: Any = decoder_of(model)
    for layer in decoder.layers:
        parts = [getattr(layer.self_attn, f"{x}_proj") for x in "qkvo"]
        parts += [getattr(layer.mlp, f"{x}_proj") for x in ("gate", "up", "down")]
        if any(type(part) is not torch.nn.Linear or part.bias is not None for part in parts):
            return "its projections have biases, adapters or quantised weights"
    return None


@dataclass
class Tiles:
    """Rows and columns of a weight that a program of a matrix-vector kernel takes at once, and its warps."""

    qkv: tuple[int, int, int] = (8, 256, 4)
    output: tuple[int, int, int] = (4, 1024, 8)
    gated: tuple[int, int, int] = (4, 512, 4)
    down: tuple[int, int, int] = (4, 1024, 8)
    head: tuple[int, int, int] = (8, 256, 4)


@dataclass
class _Layer:
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    norm_1: Tensor
    norm_2: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass
class Options:
    """How the fused step is launched."""

    launch: Launch = field(default_factory=Launch)
    tiles: Tiles = field(default_factory=Tiles)


def _side_by_side(*linears: Any) -> Tensor:
    """The weights one under the other in one tensor, of which the modules' own become views."""
    joined = torch.cat([linear.weight.detach() for linear in linears])
    start = 0
    for linear in linears:
        stop = start + linear.weight.shape[0]
        linear.weight.data = joined[start:stop]
        start = stop
    return joined


class FusedDecoder:
    """One step of all rows: reads `token`, writes `logits`, moves the cache on.

    Args:
        model: retrofitted or plain, on the device, in evaluation mode.
        state: the rows' cache; `policy` None means a full cache (budget.window = its length).

    Attributes:
        token: int64 [B], to be filled in before a step.
        logits: float32 (float64 for float64 models) [B, V].

    Raises:
        ValueError: a model or policy without fused step.
    """

    def __init__(self, model: Any, state: StepState, policy: Any, *, options: Options | None = None) -> None:
        refusal = fused_refusal(model)
        if refusal:
            raise ValueError(f"no fused step: {refusal}")
        self.options = options or Options()
        decoder: Any = decoder_of(model)
        self.state, self.rotary, self.embedding = (
            state,
            decoder.rotary_emb,
            decoder.embed_tokens.weight.detach(),
        )
        self.head, self.final_norm = model.lm_head.weight.detach(), decoder.norm.weight.detach()
        self.eps = float(model.config.rms_norm_eps)
        self.layers = [self._layer(layer) for layer in decoder.layers]
        config, first = model.config, decoder.layers[0].self_attn
        self.kernels = StepKernels(
            state, policy, query_heads=config.num_attention_heads, scaling=float(first.scaling), eps=self.eps,
            launch=self.options.launch,
        )  # fmt: skip
        rows, device, dtype = state.rows, self.embedding.device, self.embedding.dtype
        work = torch.float64 if dtype == torch.float64 else torch.float32
        hidden, inner = self.embedding.shape[1], self.layers[0].down.shape[1]

        def buffer(width: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(rows, width, dtype=kind, device=device)

        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.hidden, self.normed, self.act = buffer(hidden), buffer(hidden), buffer(inner)
        self.qkv, self.attended = buffer(self.layers[0].qkv.shape[0]), buffer(self.layers[0].output.shape[1])
        self.both = buffer(2 * inner if rows > 1 else 0)
        self.logits = buffer(self.head.shape[0], work)

    @staticmethod
    def _layer(layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        return _Layer(
            _side_by_side(attention.q_proj, attention.k_proj, attention.v_proj),
            attention.o_proj.weight.detach(),
            _side_by_side(mlp.gate_proj, mlp.up_proj),
            mlp.down_proj.weight.detach(),
            layer.input_layernorm.weight.detach(),
            layer.post_attention_layernorm.weight.detach(),
            *(None if norm is None else norm.weight.detach() for norm in norms),
        )

    @torch.no_grad()
    def step(self) -> None:
        """One token of every row; no wait for the host, so that it can be captured in a CUDA graph."""
        tiles = self.options.tiles
        torch.index_select(self.embedding, 0, self.token, out=self.hidden)
        cos, sin = self.rotary(self.hidden, self.state.seen[:, None])
        cos, sin = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        self.kernels.before_layers()
        for index, layer in enumerate(self.layers):
            self._linear(self.hidden, layer.qkv, self.qkv, tiles.qkv, norm=layer.norm_1)
            if self.kernels.hidden_weight is not None:
                weight, share = self.kernels.hidden_weight[index], self.kernels.share[index]
                self._linear(self.hidden, weight, share, tiles.qkv, norm=layer.norm_1)
            self.kernels.attend(index, self.qkv, cos, sin, self.attended, layer.q_norm, layer.k_norm)
            self._linear(self.attended, layer.output, self.hidden, tiles.output, residual=True)
            self._gated(layer)
            self._linear(self.act, layer.down, self.hidden, tiles.down, residual=True)
        self._linear(self.hidden, self.head, self.logits, tiles.head, norm=self.final_norm)
        self.kernels.advance()

    def _linear(
        self, x: Tensor, weight: Tensor, out: Tensor, tile: tuple[int, int, int], *,
        norm: Tensor | None = None,
        residual: bool = False,
    ) -> None:  # fmt: skip
        """out = (out) + weight . norm(x)."""
        if x.shape[0] > 1:
            self._linear_rows(x, weight, out, norm, residual)
            return
        rows, block, warps = tile
        pdl = self.options.launch.pdl
        vector_kernel[(triton.cdiv(weight.shape[0], rows),)](
            x, weight, x if norm is None else norm, out, self.eps, OUT=weight.shape[0], IN=weight.shape[1],
            ROWS=rows, BLOCK=block, HAS_NORM=norm is not None, RESIDUAL=residual, PDL=pdl, num_warps=warps,
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip

    def _linear_rows(
        self, x: Tensor, weight: Tensor, out: Tensor, norm: Tensor | None, residual: bool
    ) -> None:
        if norm is not None:
            width = x.shape[1]
            norm_rows[(x.shape[0],)](
                x, norm, self.normed, self.eps, IN=width, IN_P=triton.next_power_of_2(width), num_warps=4
            )
            x = self.normed
        if residual:
            torch.addmm(out, x, weight.T, out=out)
        elif out.dtype == weight.dtype:  # a scorer's weights may be wider than the model's
            torch.mm(x.to(weight.dtype), weight.T, out=out)
        else:
            out.copy_(x @ weight.T)

    def _gated(self, layer: _Layer) -> None:
        inner, hidden = layer.down.shape[1], layer.gate_up.shape[1]
        if self.hidden.shape[0] > 1:
            self._linear_rows(self.hidden, layer.gate_up, self.both, layer.norm_2, False)
            grid = (triton.cdiv(inner, 1024), self.hidden.shape[0])
            silu_rows[grid](self.both, self.act, OUT=inner, BLOCK=1024, num_warps=4)
            return
        rows, block, warps = self.options.tiles.gated
        pdl = self.options.launch.pdl
        gated_kernel[(triton.cdiv(inner, rows),)](
            self.hidden, layer.gate_up[:inner], layer.gate_up[inner:], layer.norm_2, self.act, self.eps,
            OUT=inner, IN=hidden, ROWS=rows, BLOCK=block, PDL=pdl, num_warps=warps,
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip


def capture(decoder: FusedDecoder, *, keep: bool = True) -> torch.cuda.CUDAGraph:
    """The whole step as one CUDA graph.

    The warm-up steps compile the kernels and move tokens about. With `keep` a copy of the cache stands aside
    meanwhile, which takes its size again, and the cache is left as it was; without, what it holds is lost.
    """
    saved = {name: tensor.clone() for name, tensor in decoder.state.tensors().items()} if keep else {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            decoder.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step()
    for name, tensor in decoder.state.tensors().items():
        if name in saved:
            tensor.copy_(saved[name])
    return graph
