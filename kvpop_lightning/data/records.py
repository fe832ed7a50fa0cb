"""Rows of local JSONL, Parquet and Arrow files, memory constant in their size."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpop_lightning.data.conversation import BadRowError
from kvpop_lightning.errors import UserError

KINDS = ("jsonl", "parquet", "arrow")
_COLUMNS = ("messages", "conversations", "problem", "solution", "expected_answer", "answer", "tools")


@dataclass(frozen=True)
class Row:
    """One row as it was found: `origin` is short (`file.jsonl:12`), `where` names it for a person. `record`
    is a BadRowError where it could not even be parsed."""

    record: Any
    origin: str
    where: str
    family: str


def find_files(pattern: str | None, key: str) -> list[Path]:
    """Files that a path or glob names, sorted.

    Raises:
        UserError: none given, none found, or one of them is empty or a folder.
    """
    if not pattern:
        raise UserError(f"{key} is not set; give a file or a glob")
    files = [Path(name) for name in sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))]
    if not files:
        several = "; it takes one path or glob, not a list" if pattern.startswith("[") else ""
        raise UserError(f"{key}: no file matches {pattern!r}{several}")
    for file in files:
        if not file.is_file():
            raise UserError(f"{key}: {file} is not a file; give a glob such as {file}/*.jsonl")
        if file.stat().st_size == 0:
            raise UserError(f"{key}: {file} is empty")
    return files


def file_hashes(files: list[Path]) -> dict[str, str]:
    """SHA-256 of the content of each file, by position and name (moving the folder changes nothing)."""
    hashes = {}
    for index, file in enumerate(files):
        try:
            with file.open("rb") as stream:
                hashes[f"{index}:{file.name}"] = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from error
    return hashes


def kind_of(file: Path) -> str:
    """Kind of a file by its name; anything unknown is read as JSON lines."""
    return {".parquet": "parquet", ".arrow": "arrow"}.get(file.suffix.lower(), "jsonl")


def read_rows(
    files: list[Path], kind: str | None = None, *, columns: tuple[str, ...] | None = None
) -> Iterator[Row]:
    """Rows of the files in order; `kind` None = by each file's name. Of Parquet and Arrow files only
    `columns` are read; None = those of a document, which must be there.

    Raises:
        UserError: an unreadable file, or one without rows.
    """
    readers = {"jsonl": _jsonl, "parquet": _parquet, "arrow": _arrow}
    for file in files:
        chosen, number = kind or kind_of(file), 0
        for number, record in readers[chosen](file, columns):
            where = f"{file}:{number}" if chosen == "jsonl" else f"{file} row {number}"
            yield Row(record, f"{file.name}:{number}", where, file.name)
        if number == 0:
            raise UserError(f"{file} holds no rows")


def count_rows(files: list[Path], kind: str | None) -> int:
    """Rows of the files without reading their content, for an estimate: blank lines of JSONL count too.

    Raises:
        UserError: an unreadable file.
    """
    total = 0
    for file in files:
        chosen = kind or kind_of(file)
        with _readable(file, chosen):
            if chosen == "jsonl":
                with file.open("rb") as stream:
                    total += sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(1 << 20), b""))
            elif chosen == "parquet":
                import pyarrow.parquet as pq

                total += pq.read_metadata(file).num_rows
            else:
                with _batches(file) as (_, batches):
                    total += sum(batch.num_rows for batch in batches)
    return total


def parse_line(text: str) -> Any:
    """The record in a line of JSON, or the BadRowError that says why there is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        column = (
            min(error.pos, len(text.rstrip())) + 1
        )  # a line has one line, whatever its newline makes of it
        return BadRowError("not_json", f"not JSON: {error.msg} at column {column}")


_BEGINNINGS = (
    (b"PAR1", "parquet", "it looks like Parquet: data=parquet"),
    (b"ARROW1", "arrow", "it looks like Arrow: data=arrow"),
    (b"\x1f\x8b", None, "it is compressed with gzip: unpack it first"),
    (b"\x28\xb5\x2f\xfd", None, "it is compressed with zstd: unpack it first"),
    (b"{", "jsonl", "it looks like JSON lines: data=jsonl"),
    (b"[", None, "it looks like one JSON array: write one object a line"),
)


def _hint(file: Path, kind: str) -> str:
    """What a file that cannot be read as `kind` seems to be, from its first bytes; empty: nothing known."""
    with file.open("rb") as stream:
        beginning = stream.read(64).lstrip()
    for magic, found, text in _BEGINNINGS:
        if beginning.startswith(magic):
            return "" if found == kind else f"; {text}"
    return ""


@contextmanager
def _readable(file: Path, kind: str) -> Iterator[None]:
    """Errors of the file as one line."""
    expected: tuple[type[Exception], ...] = (OSError,)
    if kind != "jsonl":
        import pyarrow as pa

        expected = (OSError, pa.ArrowException)
    try:
        yield
    except expected as error:
        if kind == "jsonl":
            raise UserError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
        why = str(error).splitlines()[0].rstrip(".")
        raise UserError(
            f"{file} is not a readable {kind.capitalize()} file: {why}{_hint(file, kind)}"
        ) from error


def _jsonl(file: Path, columns: tuple[str, ...] | None) -> Iterator[tuple[int, Any]]:
    with _readable(file, "jsonl"), file.open("rb") as stream:
        for number, raw in enumerate(stream, 1):
            if not raw.strip():
                continue
            try:
                record = parse_line(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                record = BadRowError("not_utf8", f"not UTF-8 at byte {error.start}")
            if number == 1 and isinstance(record, BadRowError | list):
                told = record if isinstance(record, BadRowError) else "the row is a list, not an object"
                reason = getattr(record, "reason", "not_an_object")
                record = BadRowError(reason, f"{told}{_hint(file, 'jsonl')}")
            yield number, record


def _parquet(file: Path, columns: tuple[str, ...] | None) -> Iterator[tuple[int, Any]]:
    import pyarrow.parquet as pq

    with _readable(file, "parquet"):
        table = pq.ParquetFile(file)
        wanted = _columns(file, table.schema_arrow.names, columns)
        yield from _numbered(table.iter_batches(batch_size=256, columns=wanted), wanted)


def _arrow(file: Path, columns: tuple[str, ...] | None) -> Iterator[tuple[int, Any]]:
    with _readable(file, "arrow"), _batches(file) as (names, batches):
        yield from _numbered(batches, _columns(file, names, columns))


@contextmanager
def _batches(file: Path) -> Iterator[tuple[list[str], Any]]:
    """Columns and batches of an Arrow file of either format."""
    import pyarrow as pa

    with pa.memory_map(str(file)) as mapped:
        try:
            whole = pa.ipc.open_file(mapped)
            names = whole.schema.names
            batches: Any = (whole.get_batch(i) for i in range(whole.num_record_batches))
        except pa.ArrowInvalid:  # the stream format, as `datasets` writes its cache
            mapped.seek(0)
            batches = pa.ipc.open_stream(mapped)
            names = batches.schema.names
        yield names, batches


def _columns(file: Path, names: list[str], asked: tuple[str, ...] | None) -> list[str]:
    found = [name for name in asked or _COLUMNS if name in names]
    if asked is not None:
        return found
    if "messages" not in found and "conversations" not in found and not {"problem", "solution"} <= {*found}:
        raise UserError(
            f"{file} row 1: missing field `messages`, or `problem` and `solution`; its columns are "
            f"{', '.join(names)}"
        )
    return found


def _numbered(batches: Any, columns: list[str]) -> Iterator[tuple[int, Any]]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, 256):
            for record in batch.select(columns).slice(start, 256).to_pylist():
                number += 1
                yield number, record
