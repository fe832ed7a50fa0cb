"""The bounded cache under a rule that decides from what is held (`kvpop_lightning.policy.stepwise`).

Prompts too go in token by token inside, since every query may change what the next one meets: a chunk saves
calls of the model, not steps of the rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpop_lightning.cache.layer import BoundedLayer
from kvpop_lightning.cache.span import Span
from kvpop_lightning.policy.budget import Budget
from kvpop_lightning.policy.stepwise import (
    EMPTY,
    Held,
    StepwiseRule,
    cut_prompt,
    look,
    make_room,
    new_held,
    place,
    shrunk,
    write,
)


class SteppedLayer(BoundedLayer):
    """`budget.total` slots per KV head, in no particular order, and what the rule notes of them.

    Attributes:
        keys, values: [B, Hkv, budget.total, D] in the model's dtype.
        position: int64 [B, 1 or Hkv, budget.total], -1 = empty; 1 where the rule keeps the same positions in
            all heads.
        held: all of it, as the rule sees it.
        peak: bytes allocated at the most, rows of the batch together: more than now where a prompt was held
            whole and then cut to `budget.total` slots.
    """

    held: Held
    peak: int = 0

    def __init__(self, budget: Budget, scorer: StepwiseRule, *, record: bool) -> None:
        super().__init__(budget, scorer, record=record)
        scorer.check(budget)

    def _allocate(self, key: Tensor, value: Tensor, hidden: Tensor | None) -> dict[str, Tensor]:
        slots = max(self.budget.total, self.scorer.prompt_tokens(self.budget))
        self._options = self.scorer.options()
        store = self._tensors_of(new_held(self.scorer, slots, key, value))
        self.peak = sum(tensor.nbytes for tensor in store.values())
        return store

    @staticmethod
    def _tensors_of(held: Held) -> dict[str, Tensor]:
        store = {"keys": held.keys, "values": held.values, "position": held.position}
        store |= {f"note.{name}": tensor for name, tensor in held.notes.items()}
        return store | {f"state.{name}": tensor for name, tensor in held.state.items()}

    def _use(self, views: dict[str, Tensor]) -> None:
        self.keys, self.values, self.position = views["keys"], views["values"], views["position"]
        notes, state = (
            {name.removeprefix(part): view for name, view in views.items() if name.startswith(part)}
            for part in ("note.", "state.")
        )
        self.held = Held(views["keys"], views["values"], views["position"], notes, state)

    @property
    def holds_prompt(self) -> bool:
        """True while there are more slots than the budget's."""
        return self.position.shape[-1] > self.budget.total

    def shrink(self) -> None:
        """Gives back what the prompt needed beyond the budget; every row's prompt must have been cut."""
        self._store = self._tensors_of(shrunk(self.held, self.budget.total))
        self._use(self._store)

    def reset(self) -> None:
        if self._store and (
            self.position.shape[-1] < self.scorer.prompt_tokens(self.budget)
            or "state.prompt" in self._store
            or self._options != self.scorer.options()
        ):
            self.release()  # the next prompt needs its slots again, or its own length
            return
        super().reset()
        if "position" in self._store:
            self._store["position"].fill_(EMPTY)


def attend_stepwise(
    layer: BoundedLayer,
    layer_index: int,
    policy: Any,
    span: Span,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    scaling: float,
) -> Tensor:
    """A stretch of C tokens, one after the other; arguments and result as for `attend_chunk`."""
    assert isinstance(layer, SteppedLayer)
    rule, held, budget = layer.scorer, layer.held, layer.budget
    heads, prompt = key.shape[1], rule.prompt_tokens(budget)
    outputs, written = [], rule.written(hidden)
    for c in range(span.length):
        active = None if span.real is None else span.valid[:, c]
        seen = span.seen + c
        if prompt and layer.holds_prompt:
            due = seen == rule.prompts(held, budget)
            due = due if active is None else due & active
            lost = cut_prompt(rule, held, budget, due).expand(-1, heads, -1)
            layer.note(lost, seen[:, None, None], lost != EMPTY, span.length)
        # `columns` counts padding too: below the budget no row can be full.
        if layer.columns + c < budget.total:
            slot = seen[:, None].clamp(max=budget.total - 1).expand(-1, held.position.shape[1])
        else:
            slot, lost = make_room(rule, held, budget, seen)
            happened = lost >= 0 if active is None else (lost >= 0) & active[:, None]
            layer.note(
                lost[..., None].expand(-1, heads, -1),
                seen[:, None, None],
                happened[..., None].expand(-1, heads, -1),
                span.length,
            )
        place(held, slot, key[:, :, c], value[:, :, c], seen, active)
        write(held, slot, {name: notes[..., c] for name, notes in written.items()}, active)
        probability = look(rule, held, budget, query[:, :, c], seen, scaling, active)
        weight = probability.to(value.dtype)
        outputs.append((weight @ held.values).reshape(query.shape[0], query.shape[1], 1, -1))
    if prompt and layer.holds_prompt and bool((span.seen + span.count > rule.prompts(held, budget)).all()):
        layer.shrink()
    return torch.cat(outputs, dim=2)
