"""Every policy by name: its scorer, whether it decays, whether it is trained (METHOD.md, section 7)."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

DECAY_SUFFIX = "+decay"
"""`random+decay`: the rule's scores with KVpop's decay, the control a trained scorer must beat
(METHOD.md, section 7)."""


@dataclass(frozen=True)
class PolicySpec:
    """One line of the comparison table.

    Attributes:
        name: as on the command line, in tables and files.
        scorer: type for `build_scorer`; None = dense attention, nothing is evicted.
        uses_decay: the configured decay applies; otherwise gamma is 1.
        trained: has parameters to train.
        summary: one line for help texts and tables.
        may_decay: `<name>+decay` is a control that exists.
        sees_future: needs the whole text (not usable for decoding on its own).
        bounded: no query attends more than the budget's keys; False = exempt from that rule, bytes are
        measured.
        trains_base: what is trained is the base model, under the policy's pattern.
        merges: keys are merged, not dropped: it has no retention map.
        reads_rope: its scorer takes `inv_freq`, the model's rotations, and `groups`, query heads per KV head.
    """

    name: str
    scorer: str | None
    summary: str
    uses_decay: bool = False
    trained: bool = False
    may_decay: bool = False
    sees_future: bool = False
    bounded: bool = True
    trains_base: bool = False
    reads_rope: bool = False
    merges: bool = False


_SPECS: dict[str, PolicySpec] = {}


def register(spec: PolicySpec) -> None:
    """Adds a policy; a name may be taken once.

    Raises:
        ValueError: the name is taken.
    """
    if spec.name in _SPECS:
        raise ValueError(f"policy {spec.name!r} is registered twice")
    _SPECS[spec.name] = spec


def available() -> list[str]:
    """All policy names: dense, rules (each with its control), trained policies, those that see the future."""
    names = []
    for spec in sorted(_SPECS.values(), key=lambda s: (s.scorer is not None, s.sees_future, s.trained)):
        names.append(spec.name)
        if spec.may_decay:
            names.append(spec.name + DECAY_SUFFIX)
    return names


def get(name: str) -> PolicySpec:
    """The policy of that name; `random+decay` and the like are derived from their rule.

    Raises:
        ValueError: no such policy (the message names the nearest ones).
    """
    base = name.removesuffix(DECAY_SUFFIX)
    spec = _SPECS.get(base)
    if spec is not None and name == base:
        return spec
    if spec is not None and spec.may_decay:
        return replace(
            spec, name=name, summary=f"{spec.summary}, with KVpop's decay", uses_decay=True, may_decay=False
        )
    if spec is not None:
        why = "it decays already" if spec.uses_decay else "decay does not change what it keeps"
        raise ValueError(f"unknown policy {name!r}: {base} takes no {DECAY_SUFFIX} ({why}); use {base}")
    near = difflib.get_close_matches(name, available(), n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(available())}"
    raise ValueError(f"unknown policy {name!r}: {hint}")


register(PolicySpec("full", None, "dense attention, nothing evicted"))
for _type, _summary in (
    ("linear", "KVpop, linear scorer"),
    ("mlp", "KVpop, MLP scorer on the token alone"),
    ("mlstm", "KVpop, scorer with memory, read one window later"),
):
    register(PolicySpec(f"kvpop_{_type}", _type, _summary, uses_decay=True, trained=True))
