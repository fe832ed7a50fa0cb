"""Policies to compare with, by name; importing this room registers them all (METHOD.md, section 7)."""

# Importing a rule registers it.
from kvpop_lightning.baselines import (  # noqa: F401
    attention_ema,
    dmc,
    dms,
    expected_attention,
    h2o,
    key_norm,
    keydiff,
    oracle,
    quest,
    random,
    retention_gate,
    snapkv,
    streaming_llm,
    tova,
)
from kvpop_lightning.baselines.build import build_policy
from kvpop_lightning.baselines.oracle import OracleScorer
from kvpop_lightning.baselines.registry import DECAY_SUFFIX, PolicySpec, available, get, register
from kvpop_lightning.baselines.retention_map import retention_map

__all__ = [
    "DECAY_SUFFIX",
    "OracleScorer",
    "PolicySpec",
    "available",
    "build_policy",
    "get",
    "register",
    "retention_map",
]
