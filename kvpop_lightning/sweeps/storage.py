"""Where a study lives: sqlite or a journal file beside the trials, or a database server for many machines."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvpop_lightning.disk import causes
from kvpop_lightning.errors import UserError
from kvpop_lightning.locks import one_at_a_time
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

    quieten_optuna()
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
        with one_at_a_time(lock_file(address)):
            storage = _when_the_tables_stand(
                lambda: RDBStorage(
                    address,
                    engine_kwargs=engine,
                    heartbeat_interval=interval,
                    grace_period=LOST_AFTER * interval,
                )
            )
        return optuna.storages.get_storage(storage)
    except Exception as error:  # the database's driver has types of its own for every cause
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"sweep.storage={public_uri(address)} cannot be opened: {reason}") from error


def _when_the_tables_stand(connect: Callable[[], Any], tries: int = 10) -> Any:
    """`connect()`, again where another worker made the same tables at the same moment.

    The tasks of a job array start together on an empty database; of the workers that see no tables and make
    them, the server lets one through.
    """
    from sqlalchemy.exc import IntegrityError, ProgrammingError

    for left in reversed(range(tries)):
        try:
            return connect()
        except Exception as error:
            raced = any(isinstance(cause, IntegrityError | ProgrammingError) for cause in causes(error))
            if not raced or not left:
                raise
            time.sleep(random.uniform(0.1, 1.0))
    raise AssertionError("tries must be at least 1")


def quieten_optuna() -> None:
    """Optuna's notices of experimental parts are no news to a user of a sweep."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def lock_file(address: str) -> Path | None:
    """What workers on an sqlite file exclude each other by.

    sqlite has no row locks: two of Optuna's workers can both see a trial waiting and both take it, and two
    that make the tables at once destroy each other's work. Servers and journals do it themselves.
    """
    path = address.partition(":///")[2] if address.startswith("sqlite") else ""
    return Path(f"{path}.lock") if path else None
