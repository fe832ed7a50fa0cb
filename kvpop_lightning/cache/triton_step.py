"""The step kernels behind two calls: `before_layers` once a token, `attend` once a layer.

Static shapes, counters on the device, no wait for the host: all of it goes into one CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kvpop_lightning.cache import triton_evict as evict
from kvpop_lightning.cache.step_state import StepState
from kvpop_lightning.cache.triton_attention import attend_kernel
from kvpop_lightning.cache.triton_mlstm import mlstm_kernel
from kvpop_lightning.policy.scorers import stack_scorers

KINDS = {
    "streaming_llm": evict.CONSTANT.value,
    "linear": evict.LINEAR.value,
    "mlp": evict.MLP.value,
    "key_norm": evict.KEY_NORM.value,
}
KINDS |= {"random": evict.RANDOM.value}
READ_HIDDEN = ("linear", "mlp")
"""Scorers that may read the hidden state of the token they score: at once, so that none is kept."""


def step_refusal(policy: Any) -> str | None:
    """Why the step kernels cannot serve this policy; None when they can."""
    scorer = policy.layer_scorer(0)
    if scorer.stepwise:
        return f"{policy.name} decides from what is held"
    if scorer.needs_hidden and scorer.kind not in READ_HIDDEN:
        return f"scorer.type={scorer.kind} with scorer.inputs={scorer.inputs} keeps hidden states"
    if scorer.kind == "mlstm":
        return None if scorer.delay >= 1 else "scorer.delay=0 reads the new token itself"
    return None if scorer.kind in KINDS else f"there is no step kernel for {scorer.kind}"


@dataclass(frozen=True)
class Launch:
    """Shapes of the launches; the defaults are the best measured on an H200 (docs/decoding.md)."""

    splits: int = 0
    """Programs that share a head's keys; 0 = enough to fill the device."""
    block: int = 0
    """Keys a program loads at a time; 0 = 64 for few rows, 128 for many."""
    attend_warps: int = 4
    attend_stages: int = 3
    evict_warps: int = 4
    scan: int = 1024
    """Priorities that a program compares at a time."""
    pdl: bool = False
    """Programmatic dependent launch: a kernel's prologue overlaps the end of the one before."""


class StepKernels:
    """The bounded cache's step on `state` for `policy` (None: nothing is ever evicted, a full cache).

    Args:
        query_heads: of the model; a multiple of the KV heads.
        scaling: factor of the attention logits.
        eps: of the RMS norms of query and key, where the model has them.

    Attributes:
        hidden_weight: [L, H * columns, Hid] for a scorer that reads hidden states, else None. Its product
            with what the q projection reads goes into `share[layer]` [B, H * columns], before `advance`.

    Raises:
        ValueError: a policy that the kernels do not serve, a head size that is no power of two.
    """

    def __init__(
        self, state: StepState, policy: Any, *, query_heads: int, scaling: float, eps: float = 1e-6,
        launch: Launch | None = None,
    ) -> None:  # fmt: skip
        self.state, self.policy, self.launch = state, policy, launch or Launch()
        self.scaling, self.eps = scaling, eps
        self.layers, self.rows, self.heads, self.slots, self.head_dim = state.keys.shape
        if self.head_dim & (self.head_dim - 1):
            raise ValueError(f"the step kernels need a head size that is a power of two, got {self.head_dim}")
        self.group = query_heads // self.heads
        self.group_padded = max(16, triton.next_power_of_2(self.group))
        device = state.keys.device
        self._splits()
        work = torch.float64 if state.keys.dtype == torch.float64 else torch.float32
        parts = (self.rows, self.heads, self.splits, self.group_padded)
        self.part_max = torch.empty(parts, dtype=work, device=device)
        self.part_sum = torch.empty(parts, dtype=work, device=device)
        self.part_out = torch.empty(*parts, self.head_dim, dtype=work, device=device)
        self.arrived = torch.zeros(self.rows, self.heads, dtype=torch.int32, device=device)
        self.kind = evict.CONSTANT.value
        self.hidden_weight: Tensor | None = None
        self.share: Tensor
        if policy is not None:
            refusal = step_refusal(policy)
            if refusal:
                raise ValueError(f"the step kernels cannot serve this policy: {refusal}")
            self._weights(device)

    def _splits(self) -> None:
        wanted, programs = self.launch.splits, 132
        if self.state.keys.is_cuda:
            programs = torch.cuda.get_device_properties(self.state.keys.device).multi_processor_count
        if not wanted:
            wanted = max(1, programs // (self.rows * self.heads))
        # Few rows: many small programs fill the device; many rows: one long one per head streams best.
        block = self.launch.block or (64 if self.rows * self.heads < programs else 128)
        self.block = block
        blocks = triton.cdiv(self.slots, block)
        self.per_split = triton.cdiv(blocks, min(wanted, blocks)) * block
        self.splits = triton.cdiv(self.slots, self.per_split)

    def _weights(self, device: torch.device) -> None:
        scorer = self.policy.layer_scorer(0)
        stacked = {
            n.removeprefix("projection."): x.detach() for n, x in stack_scorers(self.policy.scorers).items()
        }
        self.log_decay = self.policy.decay.detach().to(device).log().reshape(-1).contiguous()
        self.delay, self.columns, self.columns_2 = 0, 1, 1
        dummy = torch.zeros(1, device=device)
        names = ("key_mean", "key_std", "value_mean", "value_std", "key_weight", "value_weight", "bias")
        self.w = {name: stacked.get(name, dummy).contiguous() for name in names}
        self.w |= {n: stacked.get(n, dummy).contiguous() for n in ("output_weight", "output_bias")}
        self.w |= dict.fromkeys(("key_2", "value_2", "bias_2", "query", "share", "low", "low_slot"), dummy)
        self.seed, self.scale = getattr(scorer, "seed", 0), getattr(scorer, "scale", 1.0)
        if scorer.kind != "mlstm":
            self.kind = KINDS[scorer.kind]
            self.columns = scorer.width if scorer.kind == "mlp" else 1
            if scorer.needs_hidden:
                self._hidden_weights(stacked)
            return
        self.delay, self.columns, self.columns_2 = scorer.delay, scorer.memory_dim, scorer.width
        self.kind = evict.DELAYED.value if self.delay == self.state.budget.window else evict.WAITING.value
        first, both = slice(0, self.columns), slice(self.columns, self.columns + self.columns_2)
        self.full = {n: self.w[n] for n in ("key_weight", "value_weight", "bias")}
        for name, short in (("key_weight", "key_2"), ("value_weight", "value_2"), ("bias", "bias_2")):
            self.w[short] = self.full[name][..., both].contiguous()
            self.w[name] = self.full[name][..., first].contiguous()
        cells = (self.layers, self.rows, self.heads)
        kind = self.w["bias"].dtype
        self.w["query"] = torch.zeros(*cells, self.columns, dtype=kind, device=device)
        self.w["share"] = torch.zeros(*cells, self.columns_2, dtype=kind, device=device)
        self.w["low"] = torch.zeros(cells, dtype=torch.float64, device=device)
        self.w["low_slot"] = torch.zeros(cells, dtype=torch.int32, device=device)
        self.read = {n: stacked[n].contiguous() for n in ("norm_gain", "read_weight")}

    def _hidden_weights(self, stacked: dict[str, Tensor]) -> None:
        """The hidden state's standardisation goes into its weight and the bias: a plain product is left."""
        self.has_kv, self.is_mlp = "key_weight" in stacked, self.kind == evict.MLP.value
        self.kind = evict.INSERTED.value
        scale = stacked["hidden_std"].reciprocal()[:, None, :, None]  # [L, 1, Hid, 1]
        weight = stacked["hidden_weight"].unflatten(0, (self.layers, self.heads)) * scale
        shift = (weight * stacked["hidden_mean"][:, None, :, None]).sum(2)  # [L, H, columns]
        self.w["bias"] = (stacked["bias"] - shift.flatten(0, 1)).contiguous()
        self.hidden_weight = weight.transpose(2, 3).flatten(1, 2).contiguous()
        size = (self.layers, self.rows, self.hidden_weight.shape[1])
        self.share = torch.zeros(size, dtype=self.w["bias"].dtype, device=self.w["bias"].device)

    def before_layers(self) -> None:
        """Takes the token that leaves the window out of the ring of every layer and places or drops it."""
        if self.policy is None:
            return
        state, budget, w, launch = self.state, self.state.budget, self.w, self.launch
        evict.evict_kernel[(self.layers * self.rows * self.heads,)](
            state.keys, state.values, state.priority, state.position, state.seen, state.waiting,
            self.log_decay,
            w["key_mean"], w["key_std"], w["value_mean"], w["value_std"], w["key_weight"], w["value_weight"],
            w["bias"], w["output_weight"], w["output_bias"], w["key_2"], w["value_2"], w["bias_2"],
            w["query"],
            w["share"], w["low"], w["low_slot"], self.rows, self.seed, float(self.scale),
            KIND=self.kind, DELAY=self.delay, HEADS=self.heads, WINDOW=budget.window, SINK=budget.sink,
            TOPK=budget.topk, N=self.slots, D=self.head_dim, DECAY_STEP=self.policy.decay_step,
            COLS=self.columns, COLS_P=triton.next_power_of_2(self.columns), COLS_2=self.columns_2,
            COLS_2P=triton.next_power_of_2(self.columns_2), BLOCK=min(launch.scan,
            triton.next_power_of_2(budget.topk)),
            num_warps=launch.evict_warps, enable_fp_fusion=False,
        )  # fmt: skip

    def attend(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, out: Tensor, q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> None:  # fmt: skip
        """Stores the new token and attends: qkv [B, (Hq + 2 Hkv) D] before norm and RoPE, out [B, Hq D]."""
        state, launch = self.state, self.launch
        has_norm = q_norm is not None
        q_norm, k_norm = (q_norm, k_norm) if has_norm else (qkv, qkv)
        half = self.head_dim // 2
        if self.policy is not None and self.kind in (evict.WAITING.value, evict.DELAYED.value):
            self._absorb(layer, qkv, cos, sin, k_norm, has_norm)
        attend_kernel[(self.splits, self.heads, self.rows)](
            qkv, q_norm, k_norm, cos, sin, state.keys[layer], state.values[layer], state.seen, out,
            self.part_out, self.part_max, self.part_sum, self.arrived, self.scaling, self.eps,
            HEADS=self.heads, GROUP=self.group, GROUP_P=self.group_padded, WINDOW=state.budget.window,
            N=self.slots, D=self.head_dim, DH=half, SPLITS=self.splits,
            SPLITS_P=triton.next_power_of_2(self.splits), PER_SPLIT=self.per_split, BLOCK=self.block,
            HAS_NORM=has_norm, PDL=launch.pdl, num_warps=launch.attend_warps, num_stages=launch.attend_stages,
            **({"launch_pdl": True} if launch.pdl else {}),
        )  # fmt: skip

    def _absorb(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, k_norm: Tensor | None, has_norm: bool
    ) -> None:
        state, budget, w = self.state, self.state.budget, self.w
        dm, width = self.columns, self.columns_2
        dv = state.memory["memory"].shape[-1]
        pdl = self.launch.pdl
        mlstm_kernel[(self.heads, self.rows)](
            qkv, k_norm, cos, sin, state.keys, state.values, state.priority, state.position, state.seen,
            state.waiting, self.log_decay, w["key_mean"], w["key_std"], w["value_mean"], w["value_std"],
            self.full["key_weight"], self.full["value_weight"], self.full["bias"], state.memory["memory"],
            state.memory["normalizer"], state.memory["log_scale"], w["query"], w["share"],
            self.read["norm_gain"], self.read["read_weight"], w["output_weight"], w["output_bias"], w["low"],
            w["low_slot"], layer, self.rows, self.eps,
            DELAY=self.delay, HEADS=self.heads, GROUP=self.group, WINDOW=budget.window, SINK=budget.sink,
            TOPK=budget.topk, N=self.slots, D=self.head_dim, DH=self.head_dim // 2,
            DECAY_STEP=self.policy.decay_step, ALL=self.full["bias"].shape[-1], FIRST=dm + width, DM=dm,
            DM_P=triton.next_power_of_2(dm), DV=dv, DV_P=triton.next_power_of_2(dv), WIDTH=width,
            WIDTH_P=triton.next_power_of_2(width), HAS_NORM=has_norm, PDL=pdl, num_warps=8,
            enable_fp_fusion=False, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip

    def advance(self) -> None:
        """The new token of every row is in."""
        if self.hidden_weight is not None:
            state, w = self.state, self.w
            evict.insert_kernel[(self.layers * self.rows * self.heads,)](
                state.keys, state.values, state.waiting, state.seen, self.share, w["key_mean"], w["key_std"],
                w["value_mean"], w["value_std"], w["key_weight"], w["value_weight"], w["bias"],
                w["output_weight"], w["output_bias"], self.rows,
                HEADS=self.heads, WINDOW=state.budget.window, N=self.slots, D=self.head_dim,
                COLS=self.columns, COLS_P=triton.next_power_of_2(self.columns), HAS_KV=self.has_kv,
                IS_MLP=self.is_mlp, num_warps=self.launch.evict_warps, enable_fp_fusion=False,
            )  # fmt: skip
        self.state.seen.add_(1)
