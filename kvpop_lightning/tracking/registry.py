"""Trained policies in the MLflow model registry: scorers and description, loaded onto a base model.

A version is an ordinary pyfunc model with a signature, so that the registry's page and
`mlflow.pyfunc.load_model` understand it; `load_registered` gives the retrofitted model itself.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpop_lightning.config.schema import TrackingConfig
from kvpop_lightning.errors import UserError
from kvpop_lightning.tracking.naming import public_uri
from kvpop_lightning.tracking.store import quiet_mlflow, tracking_uri

log = logging.getLogger(__name__)

ARTIFACT = "registered"
"""Folder of the model in its run's artifacts."""
PREFIX = "models:/"
FINGERPRINT_TAG = "policy.fingerprint"


@dataclass(frozen=True)
class Registered:
    """A version in the registry."""

    name: str
    version: str
    reused: bool = False
    """The newest version held this very policy already."""

    @property
    def uri(self) -> str:
        return f"{PREFIX}{self.name}/{self.version}"


def register_policy(
    run_id: str,
    policy_folder: str | Path,
    name: str,
    *,
    uri: str | None = None,
    tags: dict[str, str] | None = None,
    description: str | None = None,
) -> Registered:
    """Registers the policy in `policy_folder` as the next version of model `name`.

    Args:
        run_id: the run that trained it; the model lies in its artifacts.
        policy_folder: as `save_pretrained` wrote it. A trained base goes along, an unchanged one does not.
        uri: tracking server; None = the configured one (`tracking_uri`).
        tags, description: of the version.

    Raises:
        UserError: no policy there, no such run, a name the registry refuses.
    """
    folder = Path(policy_folder)
    if not (folder / "kvpop.json").is_file():
        raise UserError(f"{folder} holds no trained policy (kvpop.json): train it first, or name its folder")
    address = tracking_uri(uri)
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    quiet_mlflow()
    client = MlflowClient(address, registry_uri=address)
    print_of_policy = _fingerprint(folder)
    try:
        newest = _newest(client, name)
        if newest is not None and (newest.run_id, newest.tags.get(FINGERPRINT_TAG)) == (
            run_id,
            print_of_policy,
        ):
            return Registered(name, str(newest.version), reused=True)
        place = f"{ARTIFACT}/{folder.name}"
        with tempfile.TemporaryDirectory() as temporary:
            model = Path(temporary) / "model"
            _write_model(model, folder)
            client.log_artifacts(run_id, str(model), place)
        source = f"{client.get_run(run_id).info.artifact_uri}/{place}"
        if newest is None:
            _create_model(client, name)
        version = client.create_model_version(
            name,
            source,
            run_id=run_id,
            tags={FINGERPRINT_TAG: print_of_policy, **(tags or {})},
            description=description,
        )
    except MlflowException as error:
        raise UserError(
            f"cannot register {name} at {public_uri(address)}: {' '.join(str(error).split())}"
        ) from error
    return Registered(name, str(version.version))


def register_trained(
    tracking: TrackingConfig, run_id: str | None, run_dir: Path, name: str, tags: dict[str, str] | None = None
) -> Registered | None:
    """Registers what a run trained in `run_dir`, at the end of a sweep: a failure costs a warning only."""
    if not tracking.enabled or run_id is None:
        return None
    folders = [file.parent for file in (run_dir / "policy").glob("*/kvpop.json")]
    if len(folders) != 1:
        return None
    try:
        return register_policy(run_id, folders[0], name, uri=tracking.uri, tags=tags)
    except Exception as error:  # the server, the network, a full disk: the sweep's result is worth more
        line = " ".join(str(error).split())[:300]
        log.warning(
            "%s is not registered (%s): kvpop runs register %s --name %s", name, line, run_id[:8], name
        )
        return None


def load_registered(model_uri: str, base: Any = None, *, uri: str | None = None, strict: bool = True) -> Any:
    """The retrofitted model of a registered policy.

    Args:
        model_uri: `models:/NAME/VERSION`, `models:/NAME@ALIAS`, or `models:/NAME` for the newest version.
        base: as for `kvpop_lightning.load`: a model, a name or folder; None = the one the policy names.
        uri: tracking server; None = the configured one.
        strict: refuse a base with other weights than the policy was made for.

    Raises:
        UserError: no such model or version, or the base does not fit.
    """
    from kvpop_lightning.models.persist import load

    with tempfile.TemporaryDirectory() as temporary:
        folder = download_registered(model_uri, Path(temporary), uri=uri)
        return load(folder, base, strict=strict)


def download_registered(model_uri: str, folder: Path, *, uri: str | None = None) -> Path:
    """Copies a registered policy's folder, as `kvpop_lightning.load` reads it, below `folder`; returns it."""
    import mlflow.artifacts
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    quiet_mlflow()
    address = tracking_uri(uri)
    client = MlflowClient(address, registry_uri=address)
    name, version = _name_and_version(model_uri)
    try:
        if version is None:
            newest = _newest(client, name)
            if newest is None:
                raise UserError(f"{public_uri(address)} knows no registered model {name}")
            version = str(newest.version)
        elif version.startswith("@"):
            version = str(client.get_model_version_by_alias(name, version[1:]).version)
        source = client.get_model_version_download_uri(name, version)
        place = mlflow.artifacts.download_artifacts(
            artifact_uri=source, dst_path=str(folder), tracking_uri=address
        )
    except (MlflowException, OSError) as error:
        raise UserError(f"cannot load {model_uri}: {' '.join(str(error).split())}") from error
    (found,) = (Path(place) / "artifacts").iterdir()
    return found


def _name_and_version(model_uri: str) -> tuple[str, str | None]:
    rest = model_uri.removeprefix(PREFIX).strip("/")
    if not model_uri.startswith(PREFIX) or not rest or rest.count("/") > 1:
        raise UserError(f"{model_uri} is no registered model: write models:/NAME/VERSION")
    if "@" in rest:
        name, _, alias = rest.partition("@")
        return name, f"@{alias}"
    name, _, version = rest.partition("/")
    return name, version or None


def _newest(client: Any, name: str) -> Any:
    escaped = name.replace("'", "''")
    versions = client.search_model_versions(f"name='{escaped}'")
    return max(versions, key=lambda version: int(version.version), default=None)


def _create_model(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, description="KV-cache eviction policy: scorers and budget.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":  # without versions, or another process was first
            raise


def _fingerprint(folder: Path) -> str:
    from hashlib import sha256

    digest = sha256()
    for name in ("kvpop.json", "kvpop.safetensors"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def _write_model(path: Path, folder: Path) -> None:
    """The policy's folder as a pyfunc model."""
    about = json.loads((folder / "kvpop.json").read_text())
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / folder.name  # without what else lies beside the policy
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.ckpt", ".*"))
        with _without_hints():
            import mlflow.pyfunc

            from kvpop_lightning.tracking import registry_model

            mlflow.pyfunc.save_model(
                str(path),
                python_model=registry_model.__file__,
                artifacts={"policy": str(copy)},
                signature=registry_model.signature(),
                pip_requirements=["kvpop-lightning"],
                metadata={"policy": about["policy"]["name"], "base": str(about["base"]["name"])},
                model_config={"base": None},
            )


@contextmanager
def _without_hints() -> Iterator[None]:
    """Holds back what MLflow advises about a signature of type hints: ours is given.

    MLflow sets filters of its own inside, so a filter would not do; other warnings are passed on.
    """
    with warnings.catch_warnings(record=True) as caught:
        yield
    for warning in caught:
        text = str(warning.message)
        if "Add type hints to the `predict`" not in text and "input example was not provided" not in text:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
