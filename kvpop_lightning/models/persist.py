"""Saving a retrofitted model, and loading it again.

A folder holds `kvpop.json` (format version, policy, base) and `kvpop.safetensors` (scorers and decay). The
base's own files (`config.json`, `model.safetensors`, ...) are beside them only if its weights changed;
otherwise the base is found again by name, or given to `load`.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvpop_lightning.config.schema import ModelConfig
from kvpop_lightning.errors import UserError
from kvpop_lightning.models.context import runtime_of
from kvpop_lightning.models.files import move_into, staging
from kvpop_lightning.models.fingerprint import BASE, base_fingerprint, decoder_of, is_unchanged
from kvpop_lightning.models.retrofit import is_retrofitted, retrofit, unretrofit
from kvpop_lightning.policy.retention import RetentionPolicy

FORMAT = 1
"""Version of the folder's layout; raised when an old reader would misread a new folder."""
DESCRIPTION, WEIGHTS = "kvpop.json", "kvpop.safetensors"
CONFIG, CONFIG_KEY = "config.json", "kvpop"
"""Where an exported folder repeats format and policy (`models/export.py`)."""


def save(model: Any, path: str | Path, *, base_weights: bool | None = None, **kwargs: Any) -> None:
    """Writes policy and scorers of a retrofitted model, and the base weights if they changed; safetensors
    only.

    Called by `model.save_pretrained(path)`. Files are written beside the folder and moved in when all are
    complete.

    Args:
        model: retrofitted.
        path: folder; other files in it stay.
        base_weights: write the base's weights: True, False, or None = only if they are not, for certain,
            those of the named checkpoint.
        kwargs: for the library's `save_pretrained`, used when base weights are written.

    Raises:
        UserError: no space left, or the folder cannot be written.
        ValueError: `path` is a file, the weights are on the meta device.
    """
    path = Path(path)
    if path.is_file():
        raise UserError(f"{path} is a file, save_pretrained needs a folder: choose another path")
    runtime = runtime_of(model)
    policy = runtime.policy
    if any(tensor.is_meta for tensor in policy.state_dict().values()):
        raise ValueError(
            "this model lies on the meta device and has no weights to save: load real weights first"
        )
    weights = {
        name: tensor.detach().cpu().contiguous().clone() for name, tensor in policy.state_dict().items()
    }
    if base_weights is None:
        base_weights = not is_unchanged(model, runtime.base)
    description = {
        "format": FORMAT,
        "policy": policy.to_dict(),
        "base": runtime.base | {"weights": base_weights, "architecture": type(model).__name__},
    }
    if base_weights:
        description["base"]["fingerprint"] = base_fingerprint(model)
    with staging(path) as stage:
        if base_weights:
            _save_base(model, stage, **kwargs)
        save_file(weights, stage / WEIGHTS, metadata={"format": "pt"})
        description["weights_sha256"] = sha256((stage / WEIGHTS).read_bytes()).hexdigest()
        (stage / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")
        move_into(stage, path, last=DESCRIPTION)


def _save_base(model: Any, folder: Path, **kwargs: Any) -> None:
    """The library's own files for the base alone: a folder that `from_pretrained` reads as the plain
    model.
    """
    given: dict[str, Tensor] | None = kwargs.pop("state_dict", None)
    state = model.state_dict() if given is None else given
    kwargs["state_dict"] = {n: t for n, t in state.items() if not n.startswith("kvpop.")}
    original: Any = runtime_of(model).original_class
    model.config.__dict__.pop(CONFIG_KEY, None)  # an export that the base was read from, another policy's
    original.save_pretrained(model, folder, **kwargs)


def load(path: str | Path, base: Any = None, *, strict: bool = True) -> Any:
    """The retrofitted model that `save_pretrained` wrote.

    Args:
        path: its folder.
        base: the base model, or the name or folder of its checkpoint; None = the one stored in the folder or
            named by it. A model given here is retrofitted in place.
        strict: refuse a base whose weights are not those that the policy was made for (compared only when the
            dtype is the same), and scorers whose file is not the one that was saved.

    Returns:
        The model in evaluation mode: on the CPU if the folder holds the base's weights, on
        `model.device=auto` if it names the base.

    Raises:
        UserError: no such folder, another format version, missing or misshapen weights, a base that cannot be
            found or does not fit.
    """
    path = Path(path)
    description = _read_description(path)
    about = description["base"]
    try:
        policy = RetentionPolicy.from_dict(description["policy"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path / DESCRIPTION} describes no policy of this version: {error}") from error
    _load_weights(policy, path / WEIGHTS, description.get("weights_sha256") if strict else None)
    model = _find_base(path, about, base)
    if is_retrofitted(model):
        unretrofit(model)
    same_dtype = str(next(model.parameters()).dtype) == f"torch.{about['dtype']}"
    if strict and same_dtype and base_fingerprint(model) != about["fingerprint"]:
        raise UserError(
            f"the base weights are not those that the policy in {path} was made for"
            f"{' (' + about['name'] + ')' if about['name'] else ''}: pass the right base=, or strict=False "
            "to use it all the same"
        )
    if base is None:
        record = {key: about[key] for key in ("name", "origin", "fingerprint", "dtype")}
        if about["weights"]:  # their only copy lies in this folder: saving elsewhere must write them again
            record |= {"name": None, "origin": None}
        setattr(decoder_of(model), BASE, record)
    try:
        retrofit(model, policy=policy)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"the policy in {path} does not fit this base: {error}") from error
    return model.eval()


def load_beside(path: str | Path, model: Any) -> Any:
    """`load` with `model` as base, in place; but a base that was trained with the policy, whose weights the
    folder holds, is a model of its own, on `model`'s device.

    Raises:
        UserError: as `load`.
    """
    about = _read_description(Path(path))["base"]
    if about["weights"] and about["fingerprint"] != base_fingerprint(model):
        return load(path).to(next(model.parameters()).device)
    return load(path, base=model)


def policy_name(path: str | Path) -> str | None:
    """Name of the policy that a folder holds; None if it is no folder of a retrofitted model.

    Raises:
        UserError: a description that cannot be read, of another format version or incomplete.
    """
    if not (Path(path) / DESCRIPTION).is_file():
        return None
    return str(_read_description(Path(path))["policy"].get("name"))


def _read_description(path: Path) -> dict[str, Any]:
    file = path / DESCRIPTION
    if not file.is_file():
        raise UserError(
            f"{path} holds no {DESCRIPTION}: pass a folder that save_pretrained of a retrofitted model wrote"
        )
    try:
        description = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}; save the model again") from error
    version = description.get("format") if isinstance(description, dict) else None
    if version != FORMAT:
        raise UserError(
            f"{file} has format version {version}, this kvpop_lightning reads {FORMAT}: install the "
            "version that wrote it"
        )
    for part, keys in (("policy", ()), ("base", ("name", "origin", "fingerprint", "dtype", "weights"))):
        missing = [f"{part}.{key}" for key in keys if key not in description.get(part, {})]
        if part not in description or missing:
            raise UserError(f"{file} lacks {', '.join(missing) or part}: save the model again")
    _check_config(path, description)
    return description


def _check_config(path: Path, description: dict[str, Any]) -> None:
    """An exported folder says the same twice; edited in one place it would mislead."""
    try:
        config = json.loads((path / CONFIG).read_text())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise UserError(f"{path / CONFIG} cannot be read: {error}; save the model again") from error
    said = config.get(CONFIG_KEY)
    if said is not None and said != {"format": description["format"], "policy": description["policy"]}:
        raise UserError(
            f"{path / CONFIG} and {DESCRIPTION} beside it describe different policies: export the model again"
        )


def _load_weights(policy: RetentionPolicy, file: Path, saved: str | None) -> None:
    """`saved`: hash of the file as it was written, None = not compared."""
    try:
        stored = load_file(file)
    except FileNotFoundError as error:
        raise UserError(f"{file} is missing: copy the whole folder") from error
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{file} is not a readable safetensors file ({error}): copy or save it again"
        ) from error
    wanted = policy.state_dict()
    missing, extra = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or extra:
        raise UserError(
            f"{file} does not fit its {DESCRIPTION}: missing {missing[:3] or 'none'}, unknown "
            f"{extra[:3] or 'none'}; "
            "save the model again"
        )
    for name, tensor in wanted.items():
        if stored[name].shape != tensor.shape:
            raise UserError(
                f"{file}: {name} has shape {list(stored[name].shape)}, {DESCRIPTION} says "
                f"{list(tensor.shape)}: "
                "save the model again"
            )
    if saved is not None and sha256(file.read_bytes()).hexdigest() != saved:
        raise UserError(
            f"{file} is not the file that was saved (its hash differs from {DESCRIPTION}'s): copy the whole "
            "folder again, or pass strict=False to load() for weights changed on purpose"
        )
    policy.load_state_dict(stored)


def _find_base(path: Path, about: dict[str, Any], base: Any) -> Any:
    if isinstance(base, PreTrainedModel):
        return base
    if base is None and about["weights"]:
        return _from_pretrained(str(path), about)
    if base is None and about["origin"] is not None:
        from kvpop_lightning.models.sources import load_model

        return load_model(ModelConfig(**about["origin"]))[0]
    name = base if base is not None else about["name"]
    if not name:
        raise UserError(f"{path} does not say which base its policy belongs to: pass base=")
    return _from_pretrained(str(name), about)


def _from_pretrained(name: str, about: dict[str, Any]) -> Any:
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, about["dtype"]))
    except RuntimeError as error:  # what the library raises for weights of other shapes
        raise UserError(
            f"the weights of base model {name!r} have other shapes than its config.json says: save it again"
        ) from error
    except (OSError, ValueError, SafetensorError) as error:
        line = str(error).strip().splitlines()[0]
        raise UserError(
            f"base model {name!r} cannot be loaded ({line}): pass base= with a model, name or folder"
        ) from error
