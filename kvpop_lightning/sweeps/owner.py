"""A sweep's folder belongs to one study: two of them would overwrite each other's trials."""

from __future__ import annotations

from pathlib import Path

from kvpop_lightning.errors import UserError
from kvpop_lightning.locks import one_at_a_time
from kvpop_lightning.sweeps.files import read_json, write_json
from kvpop_lightning.tracking.naming import public_uri

OWNER_FILE = "study.json"


def claim_folder(folder: Path, study: str, address: str) -> None:
    """Writes down that `folder` holds the trials of `study` in the storage at `address`.

    Raises:
        UserError: it holds those of another study already.
    """
    inside = f"{folder.resolve()}/"  # a project that was moved keeps its sweeps
    claim = {"study": study, "storage": public_uri(address.replace(inside, ""))}
    with one_at_a_time(folder / ".study.lock"):
        before = read_json(folder / OWNER_FILE)
        if not before:
            write_json(folder / OWNER_FILE, claim)
    if before and before != claim:
        raise UserError(
            f"{folder} holds the trials of study '{before.get('study')}' in {before.get('storage')}, not of "
            f"'{claim['study']}' in {claim['storage']}: set run_dir to another folder, or name that study "
            "and storage again"
        )
