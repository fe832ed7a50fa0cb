"""Where a study lives: sqlite or a journal file beside the trials, or a database server for many machines."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvpop_lightning.errors import UserError
from kvpop_lightning.tracking.naming import public_uri

SQLITE_FILE, JOURNAL_FILE = "study.db", "study.log"
LOST_AFTER = 4
"""Heartbeats without which a running trial counts as lost."""
_DRIVERS = {
    "postgresql": ("psycopg", "postgresql+psycopg", "pip install 'kvpop-lightning[sweeps]'"),
    "mysql": ("pymysql", "mysql+pymysql", "pip install pymysql"),
}


def storage_address(configured: str | None, folder: Path) -> str:
    """`sqlite:///...`, `journal:...` or a server's address from what `sweep.storage` says.

    Raises:
        UserError: neither a path nor an address that is known.
    """
    text = (configured or "").strip()
    if not text:
        return f"sqlite:///{(folder / SQLITE_FILE).resolve()}"
    if text == "journal":
        return f"journal:{(folder / JOURNAL_FILE).resolve()}"
    if "://" not in text:
        if text.endswith((".log", ".journal")):
            return f"journal:{Path(text).resolve()}"
        if text.endswith((".db", ".sqlite", ".sqlite3")):
            return f"sqlite:///{Path(text).resolve()}"
        raise UserError(
            f"sweep.storage={text}: use null, journal, a file that ends in .db or .log, or an address such "
            "as postgresql://user@host/database"
        )
    scheme, rest = text.split("://", 1)
    if scheme == "postgres":
        scheme = "postgresql"
    if scheme in _DRIVERS:
        module, scheme, how = _DRIVERS[scheme]
        if find_spec(module) is None:
            raise UserError(f"sweep.storage={public_uri(text)}: the package {module} is missing: {how}")
    elif scheme.partition("+")[0] not in ("sqlite", *_DRIVERS):
        raise UserError(f"sweep.storage={public_uri(text)}: unknown kind of storage '{scheme}'")
    return f"{scheme}://{rest}"


def open_storage(address: str, heartbeat_s: float) -> Any:
    """Optuna's storage at an address of `storage_address`.

    Raises:
        UserError: it does not answer, or cannot be written.
    """
    import optuna
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    if address.startswith("journal:"):
        path = address.removeprefix("journal:")
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            return JournalStorage(JournalFileBackend(path, JournalFileOpenLock(path)))
        except OSError as error:
            raise UserError(f"sweep.storage={path}: {error.strerror}") from error
    sqlite = address.startswith("sqlite")
    if sqlite and (path := address.partition(":///")[2]):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    # Other workers write as well: wait for the lock rather than fail; servers may close idle connections.
    engine = {"connect_args": {"timeout": 120}} if sqlite else {"pool_pre_ping": True}
    interval = max(1, round(heartbeat_s))
    try:
        return optuna.storages.get_storage(
            RDBStorage(
                address,
                engine_kwargs=engine,
                heartbeat_interval=interval,
                grace_period=LOST_AFTER * interval,
            )
        )
    except Exception as error:  # the database's driver has types of its own for every cause
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"sweep.storage={public_uri(address)} cannot be opened: {reason}") from error


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Two processes that make the tables of one sqlite file at once destroy each other's work."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".study.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
