"""Where documents come from: one interface over procedural families, local files and hub data sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from kvpop_lightning.config.schema import DataConfig
from kvpop_lightning.data import reasoning
from kvpop_lightning.data.blocks import Blocks, ProceduralBlocks, chosen_families
from kvpop_lightning.data.chat import ChatRenderer
from kvpop_lightning.data.records import KINDS, Row, count_rows, file_hashes, find_files, read_rows
from kvpop_lightning.errors import UserError


class Source(Protocol):
    """Rows somebody else wrote."""

    def identity(self) -> dict[str, Any]:
        """JSON-able: changes when any row does."""

    def rows(self) -> Iterator[Row]:
        """All rows in order, the same every time, memory constant in their number."""

    def count(self) -> int | None:
        """How many rows there are, for an estimate; None when only reading them all would tell."""


class FileSource:
    """Local JSONL, Parquet or Arrow files."""

    def __init__(self, config: DataConfig, *, evaluation: bool = False) -> None:
        if evaluation:
            self.files, self.kind = find_files(config.eval_path, "data.eval_path"), None
        else:
            self.files, self.kind = find_files(config.path, "data.path"), config.source

    def identity(self) -> dict[str, Any]:
        """Hashes of the files."""
        return {"files": file_hashes(self.files)}

    def rows(self) -> Iterator[Row]:
        """Rows of the files, in the order of their names."""
        return read_rows(self.files, self.kind)

    def count(self) -> int:
        """Rows of the files; blank lines of JSONL count too."""
        return count_rows(self.files, self.kind)


def make_source(config: DataConfig, split: str = "train") -> Source:
    """The source of a split's documents (not for `procedural`).

    Raises:
        UserError: an unknown source, or one that cannot be found.
    """
    if config.source not in (*KINDS, "hub"):
        raise UserError(f"data.source must be procedural, {', '.join(KINDS)} or hub, got {config.source!r}")
    if split == "eval" and config.eval_path is not None:
        return FileSource(config, evaluation=True)
    if config.source == "hub":
        from kvpop_lightning.data.hub import HubSource

        return HubSource(config)
    return FileSource(config)


def make_blocks(config: DataConfig, renderer: ChatRenderer, split: str) -> Blocks:
    """Blocks of a split for the configured source."""
    if config.source == "procedural":
        return ProceduralBlocks(config, renderer, split)
    from kvpop_lightning.data.document_blocks import DocumentBlocks

    return DocumentBlocks(config, renderer, split, make_source(config, split))


def source_identity(config: DataConfig) -> dict[str, Any]:
    """What the content of the source depends on, for the fingerprint."""
    if config.source == "procedural":
        return {
            "families": chosen_families(config, "train"),
            "eval_families": chosen_families(config, "eval"),
            "min_document_tokens": config.min_document_tokens,
            "max_document_tokens": config.max_document_tokens,
            "reasoning_gym": reasoning.package_version(),
        }
    identity: dict[str, Any] = make_source(config).identity()
    if config.eval_path is not None:
        identity["eval_files"] = make_source(config, "eval").identity()["files"]
    else:
        identity["eval_share"] = config.eval_share
    identity["decontaminate"] = config.decontaminate
    if config.decontaminate != "off":
        from kvpop_lightning.data.decontaminate import suite_files

        identity["suites"], identity["ngram"] = file_hashes(suite_files(config.suites)), config.ngram
    names = ("tools", "require_answer", "max_tokens", "window")
    return identity | {name: getattr(config, name) for name in names}
