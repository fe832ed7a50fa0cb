"""Which base weights a policy belongs to: a record of where they came from and a hash of what they were."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

from kvpop_lightning.models.context import decoder_of

BASE = "_kvpop_base"
"""Attribute of a decoder that holds its base record from loading (`load_model`) or the first `retrofit`
on.
"""
_POLICY_PREFIX = "kvpop."
_BLOCK = 2**24


def base_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters of the base (tied ones once) by name, without the policy's."""
    return [(n, p) for n, p in model.named_parameters() if not n.startswith(_POLICY_PREFIX)]


def base_fingerprint(model: nn.Module) -> str:
    """Hex digest of names, shapes, dtypes and every bit of the base weights; "meta" for weights that do not
    exist.

    Made for noticing that weights were trained, not against forgery: two position-weighted 64-bit sums per
    tensor, at memory speed, on the tensor's own device.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(base_parameters(model), key=lambda item: item[0]):
        if parameter.device.type == "meta":
            return "meta"
        plain, weighted = _sums(parameter.detach())
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {plain} {weighted}\n".encode())
    return digest.hexdigest()


def _sums(tensor: Tensor) -> tuple[int, int]:
    """Sum of the bits as integers, and the same weighted by place, both modulo 2^64."""
    flat = tensor.contiguous().flatten()
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # a 64-bit view must start on a 64-bit boundary
    bits = flat.view(torch.uint8)
    tail = bits[bits.numel() // 8 * 8 :].to(torch.int64)
    words = bits[: bits.numel() // 8 * 8].view(torch.int64)
    total, weighted = int(tail.sum()), 0
    weight = torch.arange(1, min(_BLOCK, max(words.numel(), 1)) + 1, device=tensor.device)
    for number, start in enumerate(range(0, words.numel(), _BLOCK)):
        block = words[start : start + _BLOCK]
        part = int(block.sum())
        total += part
        weighted += int((block * weight[: block.numel()]).sum()) + (number + 1) * part
    return total % 2**64, weighted % 2**64


def base_record(model: Any, origin: dict[str, Any] | None = None) -> dict[str, Any]:
    """What is known of a model's base: `name`, `origin`, `fingerprint`, `dtype` (JSON-able).

    Made once, when the weights are still those of `name` or `origin`, and kept on the decoder from then on.

    Args:
        model: a transformers model.
        origin: fields of the ModelConfig that made it; makes a new record.
    """
    decoder = decoder_of(model)
    kept = getattr(decoder, BASE, None)
    if kept is not None and origin is None:
        return kept
    name = getattr(model.config, "_name_or_path", "") or None
    if name and os.path.isdir(name):
        name = os.path.abspath(name)
    record = {
        "name": name,
        "origin": origin,
        "fingerprint": base_fingerprint(model),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
    setattr(decoder, BASE, record)
    return record


def is_unchanged(model: nn.Module, record: dict[str, Any]) -> bool:
    """True when the base weights are, for certain, those that `record` can bring back.

    A model that `load_model` did not make may have been trained before `retrofit` saw it: its weights are
    compared with a slice of every tensor in the checkpoint it names.
    """
    if record["fingerprint"] == "meta" or base_fingerprint(model) != record["fingerprint"]:
        return False
    return record["origin"] is not None or _matches_checkpoint(model, record["name"])


def _matches_checkpoint(model: nn.Module, name: str | None) -> bool:
    """False also when the checkpoint cannot be found or read: then the weights are saved, which is always
    right.
    """
    if not name:
        return False
    stored: set[str] = set()
    try:
        for file in _safetensors_files(name):
            with safe_open(file, framework="pt") as checkpoint:
                parameters = dict(base_parameters(model))
                for key in checkpoint.keys():  # noqa: SIM118  (not a dict)
                    if key in parameters:
                        ours = parameters[key].detach()
                        theirs = checkpoint.get_slice(key)[:2]
                        if not torch.equal(theirs.to(ours.dtype), ours[:2].cpu()):
                            return False
                        stored.add(key)
    except (OSError, ValueError, SafetensorError):
        return False
    return stored == {n for n, _ in base_parameters(model)}


def _safetensors_files(name: str) -> list[str]:
    if os.path.isdir(name):
        return sorted(str(p) for p in Path(name).glob("*.safetensors"))
    config = cached_file(name, "config.json", local_files_only=True)
    assert config is not None
    return sorted(str(p) for p in Path(config).parent.glob("*.safetensors"))
