"""What runs the model for the engine: a text per slot, new texts put in while others go on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpop_lightning.cache import BoundedCache
from kvpop_lightning.cache.kinds import layer_type
from kvpop_lightning.errors import UserError
from kvpop_lightning.models.compat import cache_keyword
from kvpop_lightning.policy.memory import dense_bytes_per_sequence

OnRead = Callable[[int, Any], None]
"""What is called after each chunk of a prompt, with the tokens read so far and the cache they are in."""


@dataclass(frozen=True)
class Held:
    """What a text holds."""

    keys: int
    """Per layer and KV head, at most."""
    bytes: int
    """As allocated."""


class Runner(Protocol):
    """Slots 0 .. slots - 1, each with a text of its own."""

    slots: int

    def read(
        self, tokens: list[int], chunk: int, text: Any = None, on_read: OnRead | None = None
    ) -> tuple[Any, Tensor]:
        """Tokens read in chunks, behind `text` if given (which is used up): (what they left behind, logits
        [V] of the token after them)."""

    def take(self, slot: int) -> Any:
        """What the slot's text has left behind, to be read on from or put into a slot."""

    def held(self, slot: int) -> Held:
        """What the slot's text holds."""

    def put(self, slot: int, text: Any) -> None:
        """The slot goes on from a text that was read; the text may be put again elsewhere."""

    def step(self, tokens: dict[int, int]) -> dict[int, Tensor]:
        """One more token in each of the slots named; logits [V] of the next."""


def read_text(model: Any, cache: Any, tokens: list[int], chunk: int, on_read: OnRead | None = None) -> Tensor:
    """Logits [V] behind `tokens`, `chunk` tokens a forward call: memory does not grow with the text."""
    ids = torch.tensor([tokens], device=next(model.parameters()).device)
    logits, read = None, 0
    for piece in ids.split(chunk, dim=1):
        logits = model(piece, **{cache_keyword(model): cache}, use_cache=True, logits_to_keep=1).logits
        read += piece.shape[1]
        if on_read is not None:
            on_read(read, cache)
    assert logits is not None
    return logits[0, -1]


def new_cache(model: Any) -> Any:
    """The cache of the model's policy; without one the library's own, which keeps every key."""
    if getattr(model, "kvpop", None) is not None:
        return BoundedCache(model, record=False)
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def held_by(cache: Any) -> Held:
    """What a text's cache holds."""
    if isinstance(cache, BoundedCache):
        return Held(cache.keys_held, cache.bytes_held())
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return Held(tensors[0].shape[2], sum(tensor.nbytes for tensor in tensors))


def full_bytes(model: Any, tokens: int) -> int:
    """Bytes of a cache of this model that keeps every key and value of `tokens` tokens, as it runs."""
    config = model.config
    return dense_bytes_per_sequence(
        tokens,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        element_bytes=next(model.parameters()).element_size(),
    )


class PlainRunner:
    """Any policy, any device, no kernels: every slot has a cache and a forward call of its own.

    What runs beside a text cannot change it, to the last bit. A model without policy keeps every key.

    Raises:
        UserError: the slots do not fit in the device's memory; says how many do.
    """

    def __init__(self, model: Any, slots: int, *, available: int | None = None) -> None:
        policy, weight = getattr(model, "kvpop", None), next(model.parameters())
        if policy is not None and layer_type(policy.layer_scorer(0)).holds_budget:
            free = free_bytes(weight.device) if available is None else available
            check_fits(slots, policy.bytes_per_sequence(weight.element_size()), free)
        self.model, self.slots = model, slots
        self._caches: dict[int, Any] = {}

    @torch.inference_mode()
    def read(
        self, tokens: list[int], chunk: int, text: Any = None, on_read: OnRead | None = None
    ) -> tuple[Any, Tensor]:
        cache = new_cache(self.model) if text is None else text
        return cache, read_text(self.model, cache, tokens, chunk, on_read)

    def take(self, slot: int) -> Any:
        return self._caches[slot]

    def held(self, slot: int) -> Held:
        return held_by(self._caches[slot])

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

    def __init__(self, model: Any, slots: int, *, graph: bool = True, available: int | None = None) -> None:
        from kvpop_lightning.cache.step_state import StepState, keeps_waiting
        from kvpop_lightning.generation.fused import FusedDecoder, capture

        policy, config = model.kvpop, model.config
        scorer, weight = policy.layer_scorer(0), model.lm_head.weight
        free = free_bytes(weight.device) if available is None else available
        check_fits(slots, policy.bytes_per_sequence(weight.element_size()), free)
        self.model, self.slots = model, slots
        try:
            self.state = StepState.empty(
                policy.budget,
                layers=config.num_hidden_layers,
                rows=slots,
                heads=scorer.num_heads,
                head_dim=scorer.head_dim,
                dtype=weight.dtype,
                device=weight.device,
                memory=scorer.init_state(1, weight.device),
                waiting=keeps_waiting(scorer, policy.budget),
            )
            self.decoder = FusedDecoder(model, self.state, policy)
            # No slot is in use yet, and `put` writes all of one.
            self._graph = capture(self.decoder, keep=False) if graph else None
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"slots={slots} leave no memory for a step ({free / 2**20:.0f} MiB were free): lower slots "
                "or the budget"
            ) from error

    @torch.no_grad()
    def read(
        self, tokens: list[int], chunk: int, text: Any = None, on_read: OnRead | None = None
    ) -> tuple[Any, Tensor]:
        cache = new_cache(self.model) if text is None else text
        return cache, read_text(self.model, cache, tokens, chunk, on_read)

    def put(self, slot: int, text: Any) -> None:
        self.state.take_over(slot, text)

    def take(self, slot: int) -> Any:
        return self.state.give_back(slot, self.model)

    def held(self, slot: int) -> Held:
        keys = min(int(self.state.seen[slot]), self.state.budget.total)
        return Held(keys, self.state.row_bytes())

    def step(self, tokens: dict[int, int]) -> dict[int, Tensor]:
        row = [tokens.get(slot, 0) for slot in range(self.slots)]  # idle slots compute what nobody reads
        self.decoder.token.copy_(torch.tensor(row))
        if self._graph is None:
            self.decoder.step()
        else:
            self._graph.replay()
        return {slot: self.decoder.logits[slot] for slot in tokens}


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated: of the GPU, or of the machine's memory."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    import psutil

    return int(psutil.virtual_memory().available)


def check_fits(slots: int, slot_bytes: int, free: int) -> None:
    """Raises UserError when `slots` caches and the one that reads a prompt need more than is free."""
    fitting = free // max(slot_bytes, 1) - 1
    if slots > fitting:
        have = f"{slot_bytes / 2**20:.0f} MiB a slot, {free / 2**20:.0f} MiB free"
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
    refusal = "backend=plain" if backend == "plain" else no_graph(model)
    if refusal is None:
        return GraphRunner(model, slots)
    if backend == "graph":
        raise UserError(f"backend=graph is not possible: {refusal}; use backend=plain")
    return PlainRunner(model, slots)


def no_graph(model: Any) -> str | None:
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
