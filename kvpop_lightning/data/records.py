"""Rows of local JSONL and Parquet files as documents, with every bad row named by file and line."""

from __future__ import annotations

import glob
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpop_lightning.data.documents import Document
from kvpop_lightning.errors import UserError

ROLES = ("system", "user", "assistant", "tool")


class BadRowError(ValueError):
    """Why a row cannot be used; `reason` is the name it is counted under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def find_files(pattern: str | None, key: str) -> list[Path]:
    """Files that a path or glob names, sorted.

    Raises:
        UserError: none given, none found, or one of them is empty or a folder.
    """
    if not pattern:
        raise UserError(f"{key} is not set; give a file or a glob")
    files = [Path(name) for name in sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))]
    if not files:
        raise UserError(f"{key}: no file matches {pattern!r}")
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
        digest = hashlib.sha256()
        try:
            with file.open("rb") as stream:
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from error
        hashes[f"{index}:{file.name}"] = digest.hexdigest()
    return hashes


def read_documents(files: list[Path], kind: str, on_bad_row: str, counts: Counter[str]) -> Iterator[Document]:
    """Documents of the files in order, memory constant in their size.

    Counts `rows`, and `bad_row_<reason>` for each row skipped.

    Raises:
        UserError: unreadable file, a file without rows, or a bad row while `on_bad_row` is `error`.
    """
    if on_bad_row not in ("error", "skip"):
        raise UserError(f"data.on_bad_row must be error or skip, got {on_bad_row!r}")
    for file in files:
        rows = 0
        for line, record in _parquet(file) if kind == "parquet" else _jsonl(file):
            rows += 1
            counts["rows"] += 1
            try:
                if isinstance(record, BadRowError):
                    raise record
                yield Document(tuple(messages_of(record)), f"{file.name}:{line}", file.name)
            except BadRowError as error:
                if on_bad_row == "error":
                    where = f"{file}:{line}" if kind == "jsonl" else f"{file} row {line}"
                    raise UserError(
                        f"{where}: {error} (data.on_bad_row=skip skips and counts such rows)"
                    ) from error
                counts[f"bad_row_{error.reason}"] += 1
        if rows == 0:
            raise UserError(f"{file} holds no rows")


def messages_of(record: Any) -> list[dict[str, str]]:
    """Messages of a row with `messages` or with `problem` and `solution`.

    Raises:
        BadRowError: a field is missing, empty or of the wrong type.
    """
    if not isinstance(record, dict):
        raise BadRowError("not_an_object", f"the row is a {type(record).__name__}, not an object")
    if record.get("messages") is None:
        fields = []
        for name in ("problem", "solution"):
            if record.get(name) is None:
                raise BadRowError(
                    "missing_field",
                    f"missing field {name!r} (a row has `messages`, or `problem` and `solution`)",
                )
            fields.append(_text(record[name], name))
        return [{"role": "user", "content": fields[0]}, {"role": "assistant", "content": fields[1]}]
    messages = record["messages"]
    if not isinstance(messages, list):
        raise BadRowError("wrong_type", f"`messages` is a {type(messages).__name__}, not a list")
    if not messages:
        raise BadRowError("empty_messages", "`messages` is empty")
    result = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") is None or message.get("content") is None:
            raise BadRowError("missing_field", f"messages[{index}] needs `role` and `content`")
        if message["role"] not in ROLES:
            raise BadRowError(
                "unknown_role", f"messages[{index}] has the role {message['role']!r}, not one of {ROLES}"
            )
        result.append(
            {"role": message["role"], "content": _text(message["content"], f"messages[{index}].content")}
        )
    if all(message["role"] != "assistant" for message in result):
        raise BadRowError("no_assistant", "no message of the assistant")
    return result


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRowError("wrong_type", f"{name} is a {type(value).__name__}, not a string")
    if not value.strip():
        raise BadRowError("empty_text", f"{name} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRowError("not_unicode", f"{name} holds half of a surrogate pair") from None
    return value


def _jsonl(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        with file.open("rb") as stream:
            for number, raw in enumerate(stream, 1):
                if not raw.strip():
                    continue
                try:
                    yield number, json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
                except UnicodeDecodeError as error:
                    yield number, BadRowError("not_utf8", f"not UTF-8 at byte {error.start}")
                except json.JSONDecodeError as error:
                    yield number, BadRowError("not_json", f"not JSON: {error.msg} at column {error.colno}")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error


def _parquet(file: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        columns = [name for name in ("messages", "problem", "solution") if name in table.schema_arrow.names]
        if "messages" not in columns and len(columns) < 2:
            names = ", ".join(table.schema_arrow.names)
            raise UserError(
                f"{file} row 1: missing field `messages`, or `problem` and `solution`; its columns are "
                f"{names}"
            )
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=columns):
            for record in batch.to_pylist():
                number += 1
                yield number, record
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} is not a readable Parquet file: {str(error).splitlines()[0]}") from error
