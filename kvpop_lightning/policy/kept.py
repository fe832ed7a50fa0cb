"""What was computed from a tensor, kept as long as the tensor lives and nobody writes into it."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Result = TypeVar("Result")


class Kept(Generic[Result]):
    """Results by the tensor they came from. Every layer asks the same of a batch's documents; one looks.

    A result must hold no view of its tensor, and nobody may write into it.
    """

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, tuple[int, Result]] = WeakTensorKeyDictionary()

    def get(self, tensor: Tensor, make: Callable[[Tensor], Result]) -> Result:
        """`make(tensor)`, or what it returned for this tensor as it is now."""
        if not _may_be_kept(tensor):
            return make(tensor)
        version, result = self._known.get(tensor, (None, None))
        if result is None or version != tensor._version:
            result = make(tensor)
            self._known[tensor] = tensor._version, result
        return result


def _may_be_kept(tensor: Tensor) -> bool:
    """Not what inference mode makes (it may enter no later gradient) or a CUDA graph (it holds nothing until
    it is replayed), nor what is no plain tensor."""
    if type(tensor) is not Tensor or tensor.is_inference() or torch.is_inference_mode_enabled():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
