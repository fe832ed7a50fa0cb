"""Who is compared: every (policy, budget) pair as a retention policy ready to be set on the model.

One training serves all budgets (METHOD.md, section 7): a trained policy keeps its scorers and takes another
number of long-range slots, lowered by what its state costs, so that all policies of one budget hold the same
bytes (METHOD.md, section 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvpop_lightning.baselines import OracleScorer, build_policy, get
from kvpop_lightning.cache import BoundedCache
from kvpop_lightning.config.own_policies import code_key
from kvpop_lightning.config.policies import own_options
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError
from kvpop_lightning.evaluation.store import tensors_digest
from kvpop_lightning.evaluation.trained import load_trained, policy_folder
from kvpop_lightning.models import dense
from kvpop_lightning.models.compat import cache_keyword
from kvpop_lightning.models.families import attention_modules, rule_facts, shape_of
from kvpop_lightning.policy import Budget, RetentionPolicy
from kvpop_lightning.policy.memory import dense_bytes_per_sequence, equal_bytes_budget
from kvpop_lightning.policy.own_attention import OwnAttention
from kvpop_lightning.policy.stepwise import StepwiseRule


@dataclass(frozen=True)
class Contestant:
    """One policy at one budget."""

    name: str
    total: int
    """Keys per KV head that the policy was given; `eval.reference_length` for `full`."""
    policy: RetentionPolicy | None = None
    """None = dense attention. Its budget is the one really held (lowered where state is paid for)."""
    model: Any = None
    """Another model than the teacher's, for a policy whose base was trained with it."""
    key: dict[str, Any] = field(default_factory=dict)
    """What decides its records: description and weights' hash."""
    reason: str | None = None
    """Why it cannot run in this setting, in one line; it then has neither policy nor records."""

    @property
    def pair(self) -> tuple[str, int]:
        return self.name, self.total

    @property
    def label(self) -> str:
        """Part of its records' file names."""
        return f"{self.name}-b{self.total}"

    def describe(self) -> str:
        """For a progress line."""
        return f"{self.name}, {self.total} keys"

    @property
    def sees_future(self) -> bool:
        return get(self.name).sees_future

    def facts(self) -> dict[str, Any]:
        """Fields of its table entry that no row decides."""
        if self.policy is None:
            return {"sees_future": False, "bounded": get(self.name).bounded and self.name != "full"}
        decay = self.policy.decay
        even = bool((decay == decay.flatten()[0]).all())
        return {
            "sees_future": self.sees_future,
            "bounded": get(self.name).bounded,
            "sink": self.policy.budget.sink,
            "window": self.policy.budget.window,
            "topk": self.policy.budget.topk,
            "decay": float(decay.flatten()[0]) if even else decay.tolist(),
            "decay_step": self.policy.decay_step,
        }

    @contextmanager
    def active(self, teacher: Any, targets: Tensor, document_ids: Tensor | None = None) -> Iterator[Any]:
        """The model with this policy set on it; the policy it had comes back afterwards.

        Args:
            teacher: the retrofitted model that serves every policy with an untrained base.
            targets: [L, 1, Hkv, T], what the oracle scores by.
        """
        assert self.policy is not None
        model = teacher if self.model is None else self.model
        before = model.kvpop
        oracles = [s for s in self.policy.scorers if isinstance(s, OracleScorer)]
        for scorer, target in zip(oracles, targets, strict=False):
            scorer.set_scores(target, document_ids)
        model.kvpop = self.policy
        try:
            yield model
        finally:
            model.kvpop = before
            for scorer in oracles:
                scorer.set_scores(None)


def budget_of(config: Config, total: int) -> Budget:
    """`total` keys per KV head with the sinks and the window of `policy.budget`.

    Raises:
        UserError: sinks and window leave nothing for the long range.
    """
    given = config.policy.budget
    topk = total - given.sink - given.window
    if topk < 1:
        raise UserError(
            f"eval.budgets: {total} keys cannot hold policy.budget.sink {given.sink} + window {given.window} "
            f"and one more: use {given.sink + given.window + 1} or more, or lower policy.budget.window"
        )
    return Budget(given.sink, given.window, topk)


def _shape(policy: RetentionPolicy) -> dict[str, int]:
    scorer = policy.layer_scorer(0)
    return {
        "num_layers": len(policy.scorers),
        "num_heads": scorer.num_heads,
        "head_dim": scorer.head_dim,
        "hidden_size": scorer.hidden_size,
    }


def _rule_facts(model: Any) -> dict[str, Any]:
    return rule_facts(model, shape_of(model, attention_modules(model)))


def _options(model: Any, config: Config, name: str, stretch: float) -> dict[str, Any]:
    """What `build_policy` takes for a policy without training; its own options come last."""
    return {
        **_shape(model.kvpop),
        "decay": config.policy.decay**stretch,
        "decay_depth": config.policy.decay_depth,
        "decay_heads": config.policy.decay_heads,
        "decay_step": config.policy.decay_step,
        "match_bytes": config.policy.equal_bytes,
        "seed": config.seed,
        **(_rule_facts(model) if get(name).reads_rope else {}),
        **own_options(config, name),
    }


def decay_exponent(config: Config, total: int) -> float:
    """What the decay is raised to at a budget of `total` keys (1 at the budget that was trained).

    Twice the slots hold a token about twice as long, so the age that costs one nat doubles with them
    (`eval.decay_by_budget`). All policies that decay, controls included, share the rule.
    """
    given = config.policy.budget
    return (given.sink + given.window + given.topk) / total if config.eval.decay_by_budget else 1.0


def at_budget(
    policy: RetentionPolicy, budget: Budget, decay_exponent: float = 1.0, *, equal_bytes: bool = True
) -> RetentionPolicy:
    """The same scorers (shared) under another budget, its state paid for in long-range slots."""
    scorers = [policy.layer_scorer(n) for n in range(len(policy.scorers))]
    if equal_bytes:
        budget = equal_bytes_budget(budget, scorers[0])
    decay = policy.decay**decay_exponent
    again = RetentionPolicy(policy.name, budget, scorers, decay=decay, decay_step=policy.decay_step)
    return again.to(policy.decay.device)


def build_contestants(
    model: Any, config: Config, names: Sequence[str], refused: Mapping[str, str] | None = None
) -> list[Contestant]:
    """Every policy of `names` at every budget of `eval.budgets` (`full` once).

    One that cannot run at a budget, as when equal bytes do not pay for its state, is there with its reason.

    Args:
        model: retrofitted, whatever its policy: gives shapes and device.
        refused: policies of `names` that are known not to run, with the reason.

    Raises:
        UserError: an unknown policy, one that is not in `run_dir/policy/<name>` yet, a budget too small.
    """
    if not names:
        raise UserError("eval.policies=[]: name at least one policy, as in policies=streaming_llm,tova")
    device = next(model.parameters()).device
    found = []
    for name in dict.fromkeys(names):
        try:
            spec = get(name)
        except ValueError as error:
            raise UserError(f"eval.policies: {error}") from None
        if spec.scorer is None:
            found.append(Contestant(name, config.eval.reference_length, key={"policy": name}))
            continue
        if reason := (refused or {}).get(name):
            found += [Contestant(name, n, key={"policy": name}, reason=reason) for n in config.eval.budgets]
            continue
        trained, own_model, base = None, None, None
        if spec.trained:
            trained, own_model, base = load_trained(policy_folder(config, name), model)
            if trained.budget.window != config.policy.budget.window:
                raise UserError(
                    f"{name} was trained with a window of {trained.budget.window} tokens, but "
                    f"policy.budget.window is {config.policy.budget.window}: set it to "
                    f"{trained.budget.window} or train again"
                )
        own = None
        if trained is not None and trained.layer_scorer(0).ragged:
            own = trained.budget  # it holds what its gates leave open, whatever is asked
        for total in config.eval.budgets if own is None else [own.total]:
            budget = own or budget_of(config, total)
            stretch = decay_exponent(config, total)
            try:
                if trained is not None:
                    policy = at_budget(trained, budget, stretch, equal_bytes=config.policy.equal_bytes)
                else:
                    policy = build_policy(name, budget, **_options(model, config, name, stretch))
                _check_that_it_evicts(policy, budget, config.eval.reference_length)
            except UserError:
                raise
            except ValueError as error:  # the table says so in its cell
                if own_options(config, name):
                    raise UserError(f"policy.options of {name}: {error}") from error
                reason = " ".join(str(error).split())
                found.append(Contestant(name, total, key={"policy": name}, reason=reason))
                continue
            policy = policy.to(device).eval()
            description = {k: v for k, v in policy.to_dict().items() if k != "name"}
            key = {"policy": description, "weights": tensors_digest(policy.state_dict()), "base": base}
            key |= code_key(name, policy.layer_scorer(0), config.policy.module)
            if options := own_options(config, name):
                key["options"] = options  # a scorer of one's own need not describe them
            found.append(Contestant(name, total, policy, own_model, key))
    return found


def _check_that_it_evicts(policy: Any, budget: Budget, reference_length: int) -> None:
    """A prompt that is exempt from the budget may be the whole row: the dense model under another name."""
    prompt = getattr(policy.layer_scorer(0), "prompt_tokens", lambda _: 0)(budget)
    if prompt >= reference_length:
        raise ValueError(
            f"holds a prompt of {prompt} tokens whole, and eval.reference_length is {reference_length}: "
            f"nothing would be evicted; raise eval.reference_length and data.row_length beyond {prompt}"
        )


def measured_bytes(
    model: Any, contestant: Contestant, reference_length: int, tokens: int = 3
) -> dict[str, int]:
    """Bytes one sequence holds, counted from the tensors of a really allocated cache after a few tokens.

    Returns:
        `bytes_held` and, of an evicting policy, `peak_bytes` in the run's dtype, `bytes_accounted` at 2 bytes
        per element and `element_bytes` of the run. `full` holds `reference_length` tokens: what its cache
        grew by per token, times that.
    """
    parameter = next(model.parameters())
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=parameter.device)
    element = parameter.element_size()
    policy = model.kvpop
    with torch.no_grad():
        if contestant.policy is None:
            cache: Any = DynamicCache()
            with dense(model):
                model(input_ids=ids, use_cache=True, **{cache_keyword(model): cache})
            tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
            held = sum(t.numel() * t.element_size() for t in tensors)
            return {
                "bytes_held": held // tokens * reference_length,
                "bytes_accounted": dense_bytes_per_sequence(
                    reference_length,
                    num_layers=len(policy.scorers),
                    num_heads=policy.layer_scorer(0).num_heads,
                    head_dim=policy.layer_scorer(0).head_dim,
                ),
                "element_bytes": element,
            }
        rule = contestant.policy.layer_scorer(0)
        if isinstance(rule, StepwiseRule):  # a prompt that is held whole must be over
            tokens = max(tokens, rule.prompt_tokens(contestant.policy.budget) + 1)
            ids = ids[:, :1].expand(-1, tokens)
        shape = (len(policy.scorers), 1, policy.layer_scorer(0).num_heads, tokens)
        nothing = torch.zeros(shape, device=parameter.device)
        with contestant.active(model, nothing, torch.zeros_like(ids)) as active:
            bounded = BoundedCache(active, record=False)
            active(input_ids=ids, use_cache=True, **{cache_keyword(active): bounded})
            if isinstance(rule, OwnAttention) and rule.holds_all:
                # It grows with the text: what is allocated per slot, times the reference length.
                keys = getattr(bounded.layers[0], "keys", None)
                assert keys is not None
                slots = keys.shape[2]
                held = bounded.bytes_held() * reference_length // slots
                return {
                    "bytes_held": held,
                    "peak_bytes": held,
                    "bytes_accounted": bounded.bytes_held(element_bytes=2) * reference_length // slots,
                    "element_bytes": element,
                }
            return {
                "bytes_held": bounded.bytes_held(),
                "peak_bytes": bounded.peak_bytes(),
                "bytes_accounted": contestant.policy.bytes_per_sequence(),
                "element_bytes": element,
            }
