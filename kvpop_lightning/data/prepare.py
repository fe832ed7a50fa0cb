"""Preparing a data set: blocks to shards, whole or not at all; resumed when interrupted, then reused."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpop_lightning.config.schema import DataConfig
from kvpop_lightning.data.blocks import SPLITS
from kvpop_lightning.data.chat import ChatRenderer
from kvpop_lightning.data.document_blocks import OVERLAPS_LISTED, DocumentBlocks, account
from kvpop_lightning.data.fingerprint import describe, fingerprint
from kvpop_lightning.data.packing import Piece
from kvpop_lightning.data.parallel import made
from kvpop_lightning.data.progress import bar
from kvpop_lightning.data.rows import INDEX, PackedRows, check_shard, write_json, write_shard
from kvpop_lightning.data.sources import make_blocks
from kvpop_lightning.errors import UserError
from kvpop_lightning.locks import one_at_a_time

TOKENS_PER_SHARD = 1 << 22
_PROGRESS = "progress.json"


@dataclass(frozen=True)
class Prepared:
    """Folder `<cache_dir>/<fingerprint>` with `train/` and `eval/`; `reused` when nothing had to be made."""

    folder: Path
    fingerprint: str
    reused: bool


def prepare(
    config: DataConfig, tokenizer: Any, *, splits: tuple[str, ...] = SPLITS, progress: bool = True
) -> Prepared:
    """Makes what is missing of the data set and returns where it is.

    Raises:
        UserError: an unusable source or setting, a damaged earlier result, or no space left.
    """
    description = describe(config, tokenizer)
    name = fingerprint(description)
    folder = Path(config.cache_dir) / name
    reused = True
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir: cannot create {folder}: {error.strerror}") from error
    with one_at_a_time(folder.with_name(f".{name}.lock")):
        for split in splits:
            if (folder / split / INDEX).is_file():
                continue
            _prepare_split(config, tokenizer, split, folder, name, description, progress)
            reused = False
    return Prepared(folder, name, reused)


def _prepare_split(
    config: DataConfig,
    tokenizer: Any,
    split: str,
    folder: Path,
    name: str,
    description: dict[str, Any],
    progress: bool,
) -> None:
    wanted = config.train_rows if split == "train" else config.eval_rows
    if wanted is not None and wanted < 1:
        raise UserError(f"data.{split}_rows must be at least 1, got {wanted}")
    if wanted is None and config.source == "procedural":
        raise UserError("data.train_rows must be set: the problems of data.source=procedural never end")
    limit = sys.maxsize if wanted is None else wanted
    partial = folder / f"{split}.partial"
    state = _resume(partial)
    blocks = make_blocks(config, ChatRenderer(tokenizer, config.loss_on), split)
    counts = Counter[str](state["counts"])
    overlaps: list[dict[str, str]] = state["overlaps"]
    shards: list[dict[str, Any]] = state["shards"]
    done = sum(shard["rows"] for shard in shards)
    per_shard = max(1, TOKENS_PER_SHARD // config.row_length)
    waiting: list[list[Piece]] = []
    source = blocks.source if isinstance(blocks, DocumentBlocks) else None
    in_source = source.count() if progress and source is not None else None
    began = time.perf_counter()

    def flush(next_block: int) -> None:
        shards.append(write_shard(partial, len(shards), waiting, config.row_length, len(tokenizer)))
        waiting.clear()
        now = {"next_block": next_block, "shards": shards, "counts": dict(counts), "overlaps": overlaps}
        write_json(partial / _PROGRESS, now)

    stream = made(blocks, state["next_block"], config.processes)
    with bar(f"preparing {split} rows", wanted, done, progress) as advance, closing(stream):
        try:
            if done < limit:
                for number, block in stream:
                    rows = block.rows[: limit - done - len(waiting)]
                    counts.update(block.counts)
                    counts["rows_not_needed"] += len(block.rows) - len(rows)
                    counts["documents_not_needed"] += _lost(rows, block.rows[len(rows) :])
                    overlaps += block.overlaps[: OVERLAPS_LISTED - len(overlaps)]
                    waiting += rows
                    advance(len(rows), _expected(wanted, done + len(waiting), counts["rows"], in_source))
                    if done + len(waiting) >= limit or len(waiting) >= per_shard:
                        done += len(waiting)
                        flush(number + 1)
                    if done >= limit:
                        break
                if waiting:
                    done += len(waiting)
                    flush(number + 1)
            advance(0, done)
        except UserError:
            if not shards:
                shutil.rmtree(partial, ignore_errors=True)
            raise
    if done == 0:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(_no_rows(config, split, counts))
    tokens = sum(shard["tokens"] for shard in shards)
    write_json(
        partial / INDEX,
        {
            "fingerprint": name,
            "split": split,
            "rows": done,
            "rows_asked": wanted,
            "row_length": config.row_length,
            "tokens": tokens,
            "supervised_tokens": sum(shard["supervised"] for shard in shards),
            "packing_efficiency": tokens / (done * config.row_length),
            "counts": dict(sorted((+counts).items())),
            "account": None if config.source == "procedural" else account(counts),
            "overlaps": overlaps,
            "seconds": time.perf_counter() - began,
            "description": description,
            "config": asdict(config),
            "shards": shards,
        },
    )
    (partial / _PROGRESS).unlink()
    partial.replace(folder / split)


def _resume(partial: Path) -> dict[str, Any]:
    """Where an interrupted run stopped; whatever it left unfinished is removed."""
    partial.mkdir(exist_ok=True)
    state: dict[str, Any] = {"next_block": 0, "shards": [], "counts": {}, "overlaps": []}
    try:
        found = json.loads((partial / _PROGRESS).read_text("utf-8"))
        for shard in found["shards"]:
            check_shard(partial, shard, hashes=True)
        state = found
    except (OSError, json.JSONDecodeError, UserError):
        pass
    known = {entry["name"] for shard in state["shards"] for entry in shard["files"].values()}
    for file in partial.iterdir():
        if file.name not in known and not (file.name == _PROGRESS and state["shards"]):
            file.unlink()
    return state


def _expected(wanted: int | None, made: int, read: int, in_source: int | None) -> int | None:
    """Rows that the split will have, judged by the share of the source that is read."""
    if not in_source or not read:
        return wanted
    likely = made * max(in_source, read) // read
    return likely if wanted is None else min(wanted, likely)


def _lost(taken: Sequence[Sequence[Piece]], left: Sequence[Sequence[Piece]]) -> int:
    """Documents of which no piece lies in a row taken."""
    kept = {piece.hash for row in taken for piece in row}
    return len({piece.hash for row in left for piece in row} - kept)


_HINTS = {
    "shorter_than_a_row": (
        "lower data.row_length, set data.eval_single_document=false or give longer documents"
    ),
    "too_long_dropped": (
        "documents are longer than a row: raise data.row_length or set data.too_long=truncate"
    ),
    "over_max_tokens": "documents are longer than data.max_tokens: raise it",
    "contaminated": "they overlap with data.suites or data.eval_path; data.decontaminate=report keeps them",
}


def _no_rows(config: DataConfig, split: str, counts: Counter[str]) -> str:
    # `kept`: what was tokenised at all, some of which is counted again under what became of it.
    told = ", ".join(f"{name} {count}" for name, count in sorted((+counts).items()) if name != "kept")
    cause = max(_HINTS, key=lambda name: counts[name])  # the reason that took most, not any that took one
    if counts[cause]:
        hint = _HINTS[cause]
    elif split == "eval" and config.eval_path is None:
        hint = "none is set aside for evaluation: raise data.eval_share or give data.eval_path"
    elif counts["other_split"]:
        hint = "all are set aside for evaluation: lower data.eval_share or give more documents"
    else:
        hint = "no document of the source can be used"
    place = config.eval_path if split == "eval" and config.eval_path else config.path
    return f"no {split} rows from {place or config.source}: {hint} ({told})"


def load_rows(prepared: Prepared, split: str) -> PackedRows:
    """Opens a prepared split.

    Raises:
        UserError: the folder was made for another data set, or a file is damaged.
    """
    rows = PackedRows(prepared.folder / split)
    if rows.fingerprint != prepared.fingerprint:
        raise UserError(
            f"{rows.folder} holds data set {rows.fingerprint}, not {prepared.fingerprint}; delete it"
        )
    return rows
