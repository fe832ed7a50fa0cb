"""Whether the policy's Triton kernels serve, decided in one place; triton is imported only where they do."""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache

import torch
from torch import Tensor

from kvpop_lightning.errors import UserError

_log = logging.getLogger(__name__)

HEAD_DIMS = range(16, 257)


def choose_backend(backend: str, tensor: Tensor, *, work: str, otherwise: str, refusal: str = "") -> str:
    """`triton` or `otherwise` for `backend="auto"`; any other name as it is, `triton` only where it can run.

    Args:
        tensor: decides the device.
        work: what is computed, for the log and for errors.
        otherwise: the form that runs anywhere.
        refusal: why the kernels do not take these inputs ("" = they do).

    Raises:
        UserError: `triton` was asked for and is not there, or cannot take these inputs.
    """
    if backend not in ("auto", "triton"):
        return backend
    reason = missing(tensor) or refusal
    if backend == "triton":
        if reason:
            raise UserError(f'backend "triton" of {work}: {reason}; use backend="auto" or "{otherwise}"')
        return backend
    if not reason and tensor.is_cuda:
        say(work, "triton", "CUDA tensors and triton are there")
        return "triton"
    say(work, otherwise, reason or "these tensors are not on a GPU")
    return otherwise


def triton_refusal(query: Tensor) -> str:
    """Why the kernels do not take `query` ("" = they do)."""
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels take bfloat16, float16 or float32, not {query.dtype}"
    if query.shape[-1] not in HEAD_DIMS:
        return f"the kernels take head dimensions {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}"
    return ""


def missing(tensor: Tensor) -> str:
    """Why no Triton kernel runs on `tensor`, whatever it is ("" = one can)."""
    if not _importable():
        return "triton is not installed"
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"triton needs a CUDA tensor, this one is on {tensor.device.type}"
    if tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) < (8, 0):
        return "triton kernels need a GPU of compute capability 8.0 or newer"
    return ""


@cache
def _importable() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def say(work: str, chosen: str, reason: str) -> None:
    """Once per choice and reason."""
    _log.info("%s: backend %s (%s)", work, chosen, reason)
