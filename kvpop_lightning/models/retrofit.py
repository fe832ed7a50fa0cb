"""`retrofit`: attach a retention policy to a pretrained model, in place, without copying any modelling
code.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from kvpop_lightning.baselines import available, build_policy, get
from kvpop_lightning.cache import BoundedCache
from kvpop_lightning.models.attend import ATTENTION_NAME
from kvpop_lightning.models.backends import set_backends
from kvpop_lightning.models.compat import CACHE_KEYWORDS, cache_keyword, given_cache
from kvpop_lightning.models.context import RUNTIME, Mode, Runtime, decoder_of, runtime_of
from kvpop_lightning.models.families import Shape, attention_modules, rule_facts, shape_of
from kvpop_lightning.models.fingerprint import base_record
from kvpop_lightning.models.hooks import install, remove
from kvpop_lightning.policy.budget import Budget, checked_budget
from kvpop_lightning.policy.retention import Decay, RetentionPolicy


def retrofit(
    model: Any,
    budget: Budget | None = None,
    scorer: str = "mlp",
    decay: Decay = 0.7,
    decay_step: int = 64,
    *,
    policy: str | RetentionPolicy | None = None,
    inputs: str = "kv",
    delay: int | None = None,
    width: int = 64,
    memory_dim: int = 16,
    value_dim: int = 32,
    match_bytes: bool = False,
    seed: int = 0,
    attention_backend: str | None = None,
    target_backend: str | None = None,
    **options: Any,
) -> Any:
    """Gives `model` a bounded memory, in place, and returns it (METHOD.md, sections 1, 5 and 6).

    Afterwards `model(ids, use_cache=False)` is the parallel sparse forward (position_ids restart at packed
    documents), `generate` works on a `BoundedCache`, `dense(model)` is the teacher on the same weights, and
    `model.kvpop` the policy, a submodule whose scorers stay in float32. A second call replaces the first. The
    model gets its own copy of its configuration, so a teacher that shared it stays dense.

    Args:
        model: a transformers model that runs through the attention interface (Llama, Qwen3, Mistral, ...),
            full attention in every layer.
        budget: keys per KV head.
        scorer: `linear`, `mlp`, `mlstm` or a rule without parameters; ignored when `policy` is given.
        decay: gamma in (0, 1], a number, one per KV head or [layers, KV heads].
        decay_step: tokens per decay step.
        policy: a policy name instead of `scorer` (`kvpop_mlp`, `random`, `random+decay`, ...; rules without
            `+decay` do not decay), or a ready RetentionPolicy, which brings its own budget.
        inputs: what a learned scorer reads, `kv`, `hidden` or `kv_hidden`.
        delay: mLSTM, tokens absorbed before a token is read; None = the window.
        width, memory_dim, value_dim: sizes of learned scorers.
        match_bytes: lower `topk` by what the scorer's memory costs (METHOD.md, section 5);
            `model.kvpop.budget` is then the lowered budget.
        seed: of the scorers' initial weights.
        attention_backend, target_backend: how attention and future-attention target are computed (`auto`,
            `reference`, `triton`, ...; `kvpop doctor` lists them); None = as the model was loaded, or `auto`.
        options: further options of `build_scorer`.

    Raises:
        ValueError: no budget, an unknown policy or option, settings out of range, a model that cannot be
            retrofitted, a backend that cannot run here (UserError). The model is unchanged then.
    """
    modules = attention_modules(model)
    shape = shape_of(model, modules)
    device = next(model.parameters()).device
    if isinstance(policy, RetentionPolicy):
        made = policy
        first = made.layer_scorer(0)
        fits = Shape(len(made.scorers), first.num_heads, first.head_dim, first.hidden_size)
        if fits != shape:
            raise ValueError(
                f"this policy was made for {fits}, the model has {shape}: use the model it was made for"
            )
    else:
        if budget is None:
            raise ValueError("retrofit needs a budget: pass budget=Budget(sink, window, topk)")
        name, budget = policy or _policy_of(scorer), checked_budget(budget)
        if get(name).reads_rope:
            options = rule_facts(model, shape) | options
        with torch.device(device):
            made = build_policy(
                name,
                budget,
                num_layers=shape.num_layers,
                num_heads=shape.num_heads,
                head_dim=shape.head_dim,
                hidden_size=shape.hidden_size,
                decay=decay,
                decay_step=decay_step,
                match_bytes=match_bytes,
                seed=seed,
                inputs=inputs,
                delay=delay,
                width=width,
                memory_dim=memory_dim,
                value_dim=value_dim,
                **options,
            )
    backends = set_backends(model, attention_backend, target_backend)
    if is_retrofitted(model):
        unretrofit(model)
    runtime = Runtime(
        owner=model,
        original_attention=model.config._attn_implementation,
        original_class=type(model),
        base=base_record(model),
        mode=Mode(attention_backend=backends.attention, target_backend=backends.target),
    )
    _own_config(model)
    model.config._attn_implementation = ATTENTION_NAME
    model.kvpop = made.to(device)
    install(runtime, decoder_of(model), modules)
    model.__class__ = _retrofitted_class(runtime.original_class)
    return model


def unretrofit(model: Any) -> Any:
    """Takes policy, hooks and attention off again, in place; the base weights stay as they are now.

    Raises:
        ValueError: the model is not retrofitted.
    """
    runtime = runtime_of(model)
    remove(runtime, decoder_of(model))
    model.__class__ = runtime.original_class
    del model.kvpop
    model.config._attn_implementation = runtime.original_attention
    return model


def is_retrofitted(model: nn.Module) -> bool:
    """True when `model` carries a retention policy."""
    return getattr(decoder_of(model), RUNTIME, None) is not None


def _policy_of(scorer: str) -> str:
    """The policy named after a scorer type: `mlp` -> `kvpop_mlp`, `random` -> `random+decay` (decay was asked
    for).
    """
    name = f"kvpop_{scorer}"
    if name in available():
        return name
    if f"{scorer}+decay" in available():
        return f"{scorer}+decay"
    get(scorer)  # an unknown name gets its own message
    return scorer


def _own_config(model: nn.Module) -> None:
    """Replaces the configuration by a copy wherever the model's modules hold it: it may be shared with a
    teacher.
    """
    shared = model.config
    own = copy.deepcopy(shared)
    for module in model.modules():
        if module.__dict__.get("config") is shared:
            module.config = own


class Retrofitted:
    """Mixed into the model's own class: generation on a bounded cache, saving with the policy, copies that
    work.
    """

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """The library's `generate` on a BoundedCache; refuses a mask that does not cover the prompt."""
        prompt, mask = inputs if inputs is not None else kwargs.get("input_ids"), kwargs.get("attention_mask")
        if (
            isinstance(prompt, Tensor)
            and isinstance(mask, Tensor)
            and mask.dim() == 2
            and mask.shape != prompt.shape
        ):
            # The library drops a mask of ones unread, whatever its length.
            raise ValueError(
                f"attention_mask must be {list(prompt.shape)} like the prompt, got {list(mask.shape)}: "
                "pass the mask that "
                "the tokenizer returned with it"
            )
        if (cache := given_cache(kwargs)) is not None:  # either name, in every version of the library
            rest = {name: value for name, value in kwargs.items() if name not in CACHE_KEYWORDS}
            kwargs = {**rest, cache_keyword(self): cache}
        parent: Any = super()
        return parent.generate(inputs, *args, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        parent: Any = super()
        if runtime_of(self).mode.dense:  # type: ignore[arg-type]
            return parent._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        given = given_cache(model_kwargs)
        if given is not None and not isinstance(given, BoundedCache):
            raise ValueError(
                f"a retrofitted model generates with a BoundedCache, got {type(given).__name__}: leave "
                "past_key_values out "
                "or pass BoundedCache(model)"
            )
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={implementation!r} does not fit a retrofitted model, whose cache is "
                "bounded: leave it out"
            )
        if given is None and generation_config.use_cache is not False:
            model_kwargs[cache_keyword(self)] = BoundedCache(self, record=False)  # type: ignore[arg-type]
        return parent._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Writes the policy and, if they changed, the base weights; see `kvpop_lightning.models.persist`."""
        from kvpop_lightning.models.persist import save

        save(self, save_directory, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time: copies and pickles rebuild it from the library's class.
        return _blank, (runtime_of(self).original_class,), self.__dict__  # type: ignore[arg-type]


@cache
def _retrofitted_class(original: Any) -> Any:
    """A subclass under the same name, so that `architectures` in a saved configuration stays loadable."""
    body = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (Retrofitted, original), body)


def _blank(original: type) -> Any:
    cls = _retrofitted_class(original)
    return cls.__new__(cls)
