"""Scorers: what gives a cached token its score (METHOD.md, section 5)."""

from kvpop_lightning.policy.scorers.base import Scorer, Tokens
from kvpop_lightning.policy.scorers.build import build_scorer, register_scorer, scorer_from_dict, scorer_types
from kvpop_lightning.policy.scorers.learned import LearnedScorer, LinearScorer, MLPScorer
from kvpop_lightning.policy.scorers.mlstm import MLSTMScorer
from kvpop_lightning.policy.scorers.moments import STANDARDIZATION_TOKENS, Moments
from kvpop_lightning.policy.scorers.stack import call_stacked, stack_scorers, unstack_scorers

__all__ = [
    "STANDARDIZATION_TOKENS",
    "LearnedScorer",
    "LinearScorer",
    "MLPScorer",
    "MLSTMScorer",
    "Moments",
    "Scorer",
    "Tokens",
    "build_scorer",
    "call_stacked",
    "register_scorer",
    "scorer_from_dict",
    "scorer_types",
    "stack_scorers",
    "unstack_scorers",
]
