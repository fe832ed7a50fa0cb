"""Rules that decide token by token from what the cache holds: attention, the held keys, the newest query.

No static priority exists for them, so the rule runs one query after the other over `B` slots, in the
bounded cache and in the parallel forward (`stepwise_parallel.py`) alike. METHOD.md, section 7: query i
attends all held keys, its own included; if `B` are then held, one is dropped before query i + 1. The drop is
carried out when the next token comes, which needs its slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvpop_lightning.policy.budget import Budget
from kvpop_lightning.policy.scorers.base import Scorer

_FAR = torch.iinfo(torch.int64).max
EMPTY = -1


@dataclass
class Held:
    """The slots of one layer, B rows of S slots; changed in place.

    P is 1 for a rule that keeps the same positions in all KV heads of a layer, Hkv otherwise.
    """

    keys: Tensor
    """[B, Hkv, S, D], after RoPE."""
    values: Tensor
    """[B, Hkv, S, D]."""
    position: Tensor
    """int64 [B, P, S], place in the text; -1 = empty."""
    notes: dict[str, Tensor] = field(default_factory=dict)
    """What the rule keeps of every slot, [B, P or Hkv, S]; 0 when a token takes the slot."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """What the rule keeps of the text, batch first."""
    derived: dict[str, Tensor] | None = None
    """What a rule computed from the keys, to be used again; None where keys change from step to step."""


@dataclass(frozen=True)
class Moment:
    """One query attending the slots; G query heads share a KV head."""

    query: Tensor
    """[B, Hkv, G, D], after RoPE, not scaled."""
    probability: Tensor
    """float32 (float64) [B, Hkv, G, S], attention over the slots; 0 on empty ones."""
    position: Tensor
    """int64 [B], place of the query in its text."""
    scale: float


class StepwiseRule(Scorer):
    """A rule of this kind; subclasses give `value_of`, and `observe` if they learn from attention.

    Attributes:
        layer_wide: the same positions are kept in all KV heads of a layer.
    """

    stepwise = True
    layer_wide: bool = False

    def protected(self, budget: Budget) -> tuple[int, int]:
        """(first tokens of the text, newest held tokens) that no drop takes.

        By default KVpop's sinks and window: that of the next query is its own key and `w - 1` held ones.
        """
        return budget.sink, budget.window - 1

    def prompt_tokens(self, budget: Budget) -> int:
        """First tokens of a text that are all held until the last of them is in; 0 = no such exemption.

        Before the next token `keep_of_prompt` cuts them down to `budget.total - 1`. At least the budget.
        """
        return 0

    def prompts(self, held: Held, budget: Budget) -> int | Tensor:
        """`prompt_tokens` of each row, int64 [B], where rows have their own; 0 = held like any other text."""
        return self.prompt_tokens(budget)

    def by_row(self, rows: int) -> list[tuple[StepwiseRule, list[int]]]:
        """The rows of a batch in groups that one rule serves: by default all of them, by this one."""
        return [(self, list(range(rows)))]

    def keep_of_prompt(self, held: Held, budget: Budget) -> Tensor:
        """bool [B, P, S], `budget.total - 1` slots to keep; slot j holds token j."""
        raise NotImplementedError

    def new_notes(self, batch: int, heads: int, slots: int, like: Tensor) -> dict[str, Tensor]:
        """Zeros for `Held.notes`, on the device and in the dtype of `like` (float32 or float64)."""
        return {}

    def new_state(self, batch: int, heads: int, like: Tensor) -> dict[str, Tensor]:
        """`Held.state` of empty texts."""
        return {}

    def observe(self, held: Held, moment: Moment) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(notes, state) after a query has attended the slots; tensors as in `held`, which is not changed."""
        return held.notes, held.state

    def logits(self, held: Held, query: Tensor, seen: Tensor, budget: Budget, scale: float) -> Tensor:
        """Logits [B, Hkv, G, S] of query [B, Hkv, G, D] at position `seen` int64 [B] over the slots."""
        return (query * scale) @ held.keys.transpose(-1, -2)

    def value_of(self, held: Held, newest: Tensor) -> Tensor:
        """[B, P, S]: the slot of lowest value is dropped, the oldest among equals.

        `newest` int64 [B] is the position of the newest held token. Empty and protected slots may get any
        number.
        """
        raise NotImplementedError

    def score_rows(
        self, key: Tensor, value: Tensor, hidden: Tensor | None, position: Tensor, document_ids: Tensor | None
    ) -> Tensor:
        raise ValueError(f"{self.kind} has no score of its own for a token: it decides from what is held")

    def written(self, hidden: Tensor | None) -> dict[str, Tensor]:
        """Notes that new tokens bring along, [B, Hkv, C] by name, from hidden [B, C, Hid] or None."""
        return {}

    def slot_bytes(self, real_bytes: int = 4) -> int:
        """Bytes of positions and notes per slot, all KV heads of a layer together."""
        like = torch.zeros((), dtype=torch.float32)
        notes = self.new_notes(1, self.num_heads, 1, like)
        return 8 * self.position_heads(self.num_heads) + sum(n.numel() for n in notes.values()) * real_bytes

    def text_bytes(self, real_bytes: int = 4) -> int:
        """Bytes of `Held.state` per sequence, all KV heads of a layer together."""
        state = self.new_state(1, self.num_heads, torch.zeros((), dtype=torch.float32))
        return sum(s.numel() for s in state.values()) * real_bytes

    def position_heads(self, heads: int) -> int:
        """P of `Held`."""
        return 1 if self.layer_wide else heads

    def check(self, budget: Budget) -> None:
        """Refuses a budget in which a full cache could hold protected tokens only.

        Raises:
            ValueError: naming the budget and the fix.
        """
        first, newest = self.protected(budget)
        if first + newest >= budget.total:
            raise ValueError(
                f"{self.kind} protects {first} first and {newest} newest tokens, which fills a budget of "
                f"{budget.total} keys: raise budget.topk"
            )


def new_held(rule: StepwiseRule, slots: int, key: Tensor, value: Tensor) -> Held:
    """Empty slots; key, value [B, Hkv, ..., D] give batch, heads, size, dtype and device."""
    batch, heads = key.shape[:2]
    like = key.new_zeros((), dtype=torch.promote_types(key.dtype, torch.float32))
    return Held(
        key.new_zeros(batch, heads, slots, key.shape[-1]),
        value.new_zeros(batch, heads, slots, value.shape[-1]),
        torch.full((batch, rule.position_heads(heads), slots), EMPTY, dtype=torch.int64, device=key.device),
        rule.new_notes(batch, heads, slots, like),
        rule.new_state(batch, heads, like),
    )


def make_room(rule: StepwiseRule, held: Held, budget: Budget, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Where the next token goes: an empty slot, or that of the token that is dropped for it.

    Args:
        seen: int64 [B], tokens of each text so far.

    Returns:
        slot and the position it holds (-1 = it was empty), int64 [B, P] each.
    """
    empty = held.position == EMPTY
    slots = held.position.shape[-1]
    if rule.prompt_tokens(budget):
        prompt = rule.prompts(held, budget)
        limit = torch.where(seen < prompt, slots, budget.total)
        full = (~empty).sum(-1) >= limit[:, None]
        # Until the prompt is cut, slot j is token j's.
        free = torch.where((seen < prompt)[:, None], seen[:, None], held.position.argmin(-1))
    else:
        full = (seen >= slots)[:, None]
        free = seen[:, None].clamp(max=slots - 1)
    first, newest = rule.protected(budget)
    spared = empty | (held.position < first) | (held.position >= (seen - newest)[:, None, None])
    value = rule.value_of(held, seen - 1).masked_fill(spared, torch.inf)
    lowest = value.amin(-1, keepdim=True)
    victim = torch.where((value == lowest) & ~spared, held.position, _FAR).argmin(-1)
    slot = torch.where(full, victim, free)
    return slot, torch.where(full, held.position.gather(-1, slot[..., None])[..., 0], EMPTY)


def cut_prompt(rule: StepwiseRule, held: Held, budget: Budget, due: Tensor | None) -> Tensor:
    """Drops what the rule does not keep of a prompt that is in, in the rows `due` (bool [B]; None = all).

    Returns:
        int64 [B, P, S]: positions that were dropped, -1 elsewhere.
    """
    dropped = (held.position != EMPTY) & ~rule.keep_of_prompt(held, budget)
    if due is not None:
        dropped &= due[:, None, None]
    lost = held.position.masked_fill(~dropped, EMPTY)
    held.position.masked_fill_(dropped, EMPTY)
    for note in held.notes.values():
        note.masked_fill_(dropped, 0.0)
    return lost


def shrunk(held: Held, slots: int) -> Held:
    """A copy with `slots` slots; no head holds more than that."""
    order = (held.position == EMPTY).to(torch.uint8).argsort(dim=-1, stable=True)[..., :slots]

    def pick(x: Tensor) -> Tensor:
        index = order.expand(-1, x.shape[1], -1)
        if x.dim() == 4:
            return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[-1]))
        return x.gather(2, index)

    notes = {name: pick(note) for name, note in held.notes.items()}
    return Held(pick(held.keys), pick(held.values), pick(held.position), notes, held.state)


def place(held: Held, slot: Tensor, key: Tensor, value: Tensor, seen: Tensor, active: Tensor | None) -> None:
    """Writes one token per row: key, value [B, Hkv, D] into slot int64 [B, P]; rows not `active` [B] stay."""
    heads = key.shape[1]
    for slots, new in ((held.keys, key), (held.values, value)):
        index = slot.expand(-1, heads)[..., None, None].expand(-1, -1, 1, new.shape[-1])
        fresh = new[:, :, None]
        if active is not None:
            fresh = torch.where(active[:, None, None, None], fresh, slots.gather(2, index))
        slots.scatter_(2, index, fresh)
    number = seen[:, None].expand_as(slot)[..., None]
    if active is not None:
        number = torch.where(active[:, None, None], number, held.position.gather(-1, slot[..., None]))
    held.position.scatter_(-1, slot[..., None], number)
    for note in held.notes.values():
        index = slot.expand(-1, note.shape[1])[..., None]
        if active is None:
            note.scatter_(-1, index, 0.0)
        else:
            kept = note.gather(-1, index)
            note.scatter_(-1, index, torch.where(active[:, None, None], torch.zeros_like(kept), kept))


def write(held: Held, slot: Tensor, notes: dict[str, Tensor], active: Tensor | None) -> None:
    """Writes notes [B, Hkv] of the token that was just placed into slot int64 [B, P]."""
    for name, new in notes.items():
        note = held.notes[name]
        index = slot.expand(-1, note.shape[1])[..., None]
        fresh = new[..., None].to(note.dtype)
        if active is not None:
            fresh = torch.where(active[:, None, None], fresh, note.gather(-1, index))
        note.scatter_(-1, index, fresh)


def look(
    rule: StepwiseRule,
    held: Held,
    budget: Budget,
    query: Tensor,
    seen: Tensor,
    scale: float,
    active: Tensor | None,
) -> Tensor:
    """The query's attention over the slots, which the rule takes note of.

    Args:
        query: [B, Hq, D]; seen: int64 [B], its position.

    Returns:
        float32 (float64) [B, Hkv, G, S].
    """
    batch, heads = held.keys.shape[:2]
    grouped = query.view(batch, heads, -1, query.shape[-1])
    logits = rule.logits(held, grouped, seen, budget, scale)
    logits = logits.to(torch.promote_types(query.dtype, torch.float32))
    logits = logits.masked_fill((held.position == EMPTY)[:, :, None], -torch.inf)
    if active is not None:  # a row that holds nothing yet must not give NaN
        logits = logits.masked_fill(~active[:, None, None, None], 0.0)
    probability = torch.softmax(logits, dim=-1)
    notes, state = rule.observe(held, Moment(grouped, probability, seen, scale))
    for kept, new in ((held.notes, notes), (held.state, state)):
        for name, tensor in kept.items():
            fresh = new[name]
            if active is not None:
                fresh = torch.where(active.view(-1, *[1] * (fresh.dim() - 1)), fresh, tensor)
            if fresh is not tensor:
                tensor.copy_(fresh)
    return probability
