"""Prepared rows on disk: memory-mapped shards beside an index that says what they must be.

A split is a folder with `index.json` (written last), and per shard `tokens-N.npy` (uint16 or uint32 [rows,
T]), `documents-N.npy` (int32 [rows, T], -1 padding), `loss-N.npy` (bool [rows, T]) and `pieces-N.jsonl`
(which documents lie in which row). Files appear under their names only when whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from kvpop_lightning.data.packing import Piece, assemble, row_tensors
from kvpop_lightning.disk import is_disk_full
from kvpop_lightning.errors import UserError

INDEX = "index.json"
_ARRAYS = ("tokens", "documents", "loss")
_VERIFY_BELOW = 256 << 20  # bytes: hashes of small data sets are checked whenever they are opened


def write_whole(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Writes a file under a temporary name, syncs it and renames it; on failure nothing is left behind.

    Raises:
        UserError: no space, quota or permission.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(disk_message(error, path)) from error
        raise


def disk_message(error: OSError, path: Path) -> str:
    """One line that says what to do about a file that could not be written."""
    if is_disk_full(error):
        return f"no space left while writing {path}; free some or set data.cache_dir to a larger disk"
    return f"cannot write {path}: {error.strerror or error}"


def write_shard(
    folder: Path, number: int, rows: Sequence[Sequence[Piece]], row_length: int, vocab: int
) -> dict[str, Any]:
    """Writes one shard and returns its entry of the index."""
    arrays = [assemble(row, row_length) for row in rows]
    token_type = np.uint16 if vocab <= 1 << 16 else np.uint32
    stacked = {
        "tokens": np.stack([tokens for tokens, _, _ in arrays]).astype(token_type),
        "documents": np.stack([documents for _, documents, _ in arrays]),
        "loss": np.stack([loss for _, _, loss in arrays]),
    }
    files = {}
    for name, array in stacked.items():
        path = folder / f"{name}-{number:05d}.npy"
        write_whole(path, lambda stream, array=array: np.save(_Through(stream), array))  # type: ignore[misc]
        files[name] = _entry(path)
    lines = [
        json.dumps([[p.origin, p.family, len(p), p.hash[:16]] for p in row], ensure_ascii=False)
        for row in rows
    ]
    path = folder / f"pieces-{number:05d}.jsonl"
    write_whole(path, lambda stream: _write_text(stream, "\n".join(lines) + "\n"))
    files["pieces"] = _entry(path)
    return {
        "rows": len(rows),
        "files": files,
        "tokens": int((stacked["documents"] >= 0).sum()),
        "supervised": int(stacked["loss"].sum()),
    }


class _Through:
    """Passes on to a file. numpy writes to a real one past Python, and its error on a full disk then has lost
    the reason."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON whole or not at all."""
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    write_whole(path, lambda stream: _write_text(stream, text))


def _write_text(stream: IO[bytes], text: str) -> None:
    stream.write(text.encode("utf-8", "surrogatepass"))


def _entry(path: Path) -> dict[str, Any]:
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_shard(folder: Path, shard: dict[str, Any], *, hashes: bool) -> None:
    """Compares the files of a shard with the index.

    Raises:
        UserError: a file is missing, cut off or changed.
    """
    for entry in shard["files"].values():
        path = folder / entry["name"]
        again = f"delete {folder} and prepare again"
        if not path.is_file():
            raise UserError(f"{path} is missing; {again}")
        if path.stat().st_size != entry["bytes"]:
            raise UserError(
                f"{path} has {path.stat().st_size} bytes, the index says {entry['bytes']}; {again}"
            )
        if hashes and _sha256(path) != entry["sha256"]:
            raise UserError(f"{path} does not have the content that the index names; {again}")


class PackedRows(Dataset[dict[str, torch.Tensor]]):
    """Prepared rows of one split, memory-mapped.

    Item `i` is a dict of `input_ids`, `position_ids`, `document_ids` int64 [T], `loss_mask` bool [T] and
    `row` int64 [].

    Args:
        folder: what `prepare` wrote.
        verify: compare hashes as well as sizes; None = when the split is smaller than 256 MB.

    Raises:
        UserError: no index, or a shard that is missing, cut off or changed.
    """

    def __init__(self, folder: str | Path, *, verify: bool | None = None) -> None:
        self.folder = Path(folder)
        try:
            self.index: dict[str, Any] = json.loads((self.folder / INDEX).read_text("utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise UserError(f"{self.folder} holds no prepared rows ({error}); run kvpop prepare") from error
        self.fingerprint: str = self.index["fingerprint"]
        self.row_length: int = self.index["row_length"]
        shards = self.index["shards"]
        size = sum(entry["bytes"] for shard in shards for entry in shard["files"].values())
        for shard in shards:
            check_shard(self.folder, shard, hashes=size < _VERIFY_BELOW if verify is None else verify)
        self._first = np.cumsum([0, *(shard["rows"] for shard in shards)])
        self._open: dict[int, tuple[np.ndarray, ...]] = {}

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        shard = int(np.searchsorted(self._first, index, side="right")) - 1
        tokens, documents, loss = (array[index - self._first[shard]] for array in self._arrays(shard))
        return {
            name: torch.from_numpy(np.array(a))
            for name, a in row_tensors(tokens, documents, loss, index).items()
        }

    def _arrays(self, shard: int) -> tuple[np.ndarray, ...]:
        if shard not in self._open:
            files = self.index["shards"][shard]["files"]
            self._open[shard] = tuple(
                np.load(self.folder / files[name]["name"], mmap_mode="r") for name in _ARRAYS
            )
        return self._open[shard]

    def __getstate__(self) -> dict[str, Any]:
        # Workers map the files themselves instead of receiving their content.
        return {**self.__dict__, "_open": {}}

    def pieces(self, index: int) -> list[dict[str, Any]]:
        """The documents of a row: origin, family, number of tokens and hash, in order."""
        shard = int(np.searchsorted(self._first, index, side="right")) - 1
        path = self.folder / self.index["shards"][shard]["files"]["pieces"]["name"]
        line = path.read_text("utf-8", "surrogatepass").splitlines()[index - int(self._first[shard])]
        return _pieces(line)

    def all_pieces(self) -> Iterator[list[dict[str, Any]]]:
        """The documents of every row in order, each shard's list read once."""
        for shard in self.index["shards"]:
            path = self.folder / shard["files"]["pieces"]["name"]
            for line in path.read_text("utf-8", "surrogatepass").splitlines():
                yield _pieces(line)


def _pieces(line: str) -> list[dict[str, Any]]:
    """The documents of a row from its line in a shard's list."""
    names = ("origin", "family", "tokens", "hash")
    return [dict(zip(names, piece, strict=True)) for piece in json.loads(line)]
