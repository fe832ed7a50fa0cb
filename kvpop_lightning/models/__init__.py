"""Pretrained models with a retention policy: attach, run, save, load."""

from __future__ import annotations

from kvpop_lightning.models.attend import ATTENTION_NAME
from kvpop_lightning.models.context import LayerObservation, LayerPrefix
from kvpop_lightning.models.known import build_on_meta
from kvpop_lightning.models.modes import after_prefix, dense, observe, replay, softly
from kvpop_lightning.models.persist import load, save
from kvpop_lightning.models.retrofit import is_retrofitted, retrofit, unretrofit
from kvpop_lightning.models.smollm2 import smollm2_available
from kvpop_lightning.models.sources import load_model
from kvpop_lightning.models.tiny import tiny_model, tiny_tokenizer

__all__ = [
    "ATTENTION_NAME",
    "LayerObservation",
    "LayerPrefix",
    "after_prefix",
    "build_on_meta",
    "dense",
    "is_retrofitted",
    "load",
    "load_model",
    "observe",
    "replay",
    "retrofit",
    "save",
    "smollm2_available",
    "softly",
    "tiny_model",
    "tiny_tokenizer",
    "unretrofit",
]
