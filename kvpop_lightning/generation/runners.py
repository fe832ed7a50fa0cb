"""What runs the model for the engine: a text per slot, new texts put in while others go on."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpop_lightning.cache import BoundedCache
from kvpop_lightning.errors import UserError
from kvpop_lightning.models.compat import cache_keyword


class Runner(Protocol):
    """Slots 0 .. slots - 1, each with a text of its own."""

    slots: int

    def read(self, tokens: list[int], chunk: int) -> tuple[Any, Tensor]:
        """A text read in chunks: (what it left behind, logits [V] of the token after it)."""

    def put(self, slot: int, text: Any) -> None:
        """The slot goes on from a text that was read; the text may be put again elsewhere."""

    def step(self, tokens: dict[int, int]) -> dict[int, Tensor]:
        """One more token in each of the slots named; logits [V] of the next."""


def read_text(model: Any, cache: Any, tokens: list[int], chunk: int) -> Tensor:
    """Logits [V] behind `tokens`, `chunk` tokens a forward call: memory does not grow with the text."""
    ids = torch.tensor([tokens], device=next(model.parameters()).device)
    logits = None
    for piece in ids.split(chunk, dim=1):
        logits = model(piece, **{cache_keyword(model): cache}, use_cache=True, logits_to_keep=1).logits
    assert logits is not None
    return logits[0, -1]


class PlainRunner:
    """Any policy, any device, no kernels: every slot has a cache and a forward call of its own.

    What runs beside a text cannot change it, to the last bit. A model without policy keeps every key.
    """

    def __init__(self, model: Any, slots: int) -> None:
        self.model, self.slots = model, slots
        self._caches: dict[int, Any] = {}

    def _new(self) -> Any:
        if getattr(self.model, "kvpop", None) is not None:
            return BoundedCache(self.model, record=False)
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def read(self, tokens: list[int], chunk: int) -> tuple[Any, Tensor]:
        cache = self._new()
        return cache, read_text(self.model, cache, tokens, chunk)

    def put(self, slot: int, text: Any) -> None:
        with torch.inference_mode():
            self._caches[slot] = copy.deepcopy(text)

    @torch.inference_mode()
    def step(self, tokens: dict[int, int]) -> dict[int, Tensor]:
        return {slot: read_text(self.model, self._caches[slot], [token], 1) for slot, token in tokens.items()}


class GraphRunner:
    """All slots in one fused step, one CUDA graph (`FusedDecoder`).

    Raises:
        UserError: the slots do not fit in the device's memory; says how many do.
        ValueError: a model or policy that the fused step does not serve.
    """

    def __init__(self, model: Any, slots: int, *, graph: bool = True, free_bytes: int | None = None) -> None:
        from kvpop_lightning.cache.step_state import StepState
        from kvpop_lightning.generation.fused import FusedDecoder, capture

        policy, config = model.kvpop, model.config
        scorer, weight = policy.layer_scorer(0), model.lm_head.weight
        if free_bytes is None and weight.is_cuda:
            free_bytes = torch.cuda.mem_get_info(weight.device)[0]
        size = policy.bytes_per_sequence(weight.element_size())
        if free_bytes is not None:
            check_fits(slots, size, free_bytes)
        self.model, self.slots = model, slots
        self.state = StepState.empty(
            policy.budget,
            layers=config.num_hidden_layers,
            rows=slots,
            heads=scorer.num_heads,
            head_dim=scorer.head_dim,
            dtype=weight.dtype,
            device=weight.device,
            memory=scorer.init_state(1, weight.device),
            waiting=scorer.stateful and scorer.delay < policy.budget.window,
        )
        self.decoder = FusedDecoder(model, self.state, policy)
        self._graph = capture(self.decoder) if graph else None

    @torch.no_grad()
    def read(self, tokens: list[int], chunk: int) -> tuple[Any, Tensor]:
        cache = BoundedCache(self.model, record=False)
        return cache, read_text(self.model, cache, tokens, chunk)

    def put(self, slot: int, text: Any) -> None:
        self.state.take_over(slot, text)

    def step(self, tokens: dict[int, int]) -> dict[int, Tensor]:
        row = [tokens.get(slot, 0) for slot in range(self.slots)]  # idle slots compute what nobody reads
        self.decoder.token.copy_(torch.tensor(row))
        if self._graph is None:
            self.decoder.step()
        else:
            self._graph.replay()
        return {slot: self.decoder.logits[slot] for slot in tokens}


def check_fits(slots: int, slot_bytes: int, free_bytes: int) -> None:
    """Raises UserError when `slots` caches and the one that reads a prompt need more than is free."""
    fitting = free_bytes // max(slot_bytes, 1) - 1
    if slots > fitting:
        have = f"{slot_bytes / 2**20:.0f} MiB a slot, {free_bytes / 2**20:.0f} MiB free"
        raise UserError(
            f"slots={slots} do not fit ({have}): at most {max(fitting, 0)} do; lower slots or the budget"
        )


def make_runner(model: Any, slots: int, backend: str = "auto") -> Runner:
    """`graph`: the fused step in a CUDA graph; `plain`: the library's modules; `auto`: graph where it serves.

    Raises:
        UserError: `graph` was asked for and cannot be had, or an unknown backend.
    """
    if backend not in ("auto", "graph", "plain"):
        raise UserError(f"backend must be auto, graph or plain, got {backend!r}")
    refusal = "backend=plain" if backend == "plain" else _no_graph(model)
    if refusal is None:
        return GraphRunner(model, slots)
    if backend == "graph":
        raise UserError(f"backend=graph is not possible: {refusal}; use backend=plain")
    return PlainRunner(model, slots)


def _no_graph(model: Any) -> str | None:
    if next(model.parameters()).device.type != "cuda":
        return "the model is not on a CUDA device"
    try:
        from kvpop_lightning.cache.triton_step import step_refusal
        from kvpop_lightning.generation.fused import fused_refusal
    except ImportError as error:
        return f"triton is missing ({error})"
    if getattr(model, "kvpop", None) is None:
        return "the model has no retention policy"
    head_dim = model.kvpop.layer_scorer(0).head_dim
    if head_dim & (head_dim - 1) or head_dim < 32:
        return f"head size {head_dim} is no power of two from 32 on"
    return fused_refusal(model) or step_refusal(model.kvpop)
