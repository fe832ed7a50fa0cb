"""Policies to compare with, by name; importing this room registers them all (METHOD.md, section 7)."""

# Importing a rule registers it.
from kvpop_lightning.baselines import h2o, key_norm, oracle, random, streaming_llm, tova  # noqa: F401
from kvpop_lightning.baselines.build import build_policy
from kvpop_lightning.baselines.oracle import OracleScorer
from kvpop_lightning.baselines.registry import DECAY_SUFFIX, PolicySpec, available, get, register

__all__ = ["DECAY_SUFFIX", "OracleScorer", "PolicySpec", "available", "build_policy", "get", "register"]
