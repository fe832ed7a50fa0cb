"""Data sets of the Hugging Face hub, streamed by `datasets`; local folders of the same layout as well.

`datasets` finds the configuration, the splits and their files and opens them wherever they are. JSON lines
are then read as lines and parsed here: its own JSON reader infers a schema from the first rows and fails as a
whole on a row that does not fit, where we want that row named and counted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpop_lightning.config.schema import DataConfig
from kvpop_lightning.data.records import Row, file_hashes, parse_line
from kvpop_lightning.errors import UserError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".jsonl.xz", ".jsonl.bz2")


class HubSource:
    """Rows of one data set of the hub, or of a local folder that `datasets` can read.

    Raises:
        UserError: no `data.path`, `datasets` not installed, or a data set or split that cannot be found.
    """

    def __init__(self, config: DataConfig) -> None:
        if not config.path:
            raise UserError("data.path is not set; give the id of a data set, as in nvidia/Nemotron-Math-v2")
        self.config = config
        self.path = str(Path(config.path).expanduser()) if self._local else config.path
        self._builder: Any = None

    @property
    def _local(self) -> bool:
        return Path(str(self.config.path)).expanduser().exists()

    def identity(self) -> dict[str, Any]:
        """What the rows depend on: the files' content, or the commit of the hub's data set."""
        chosen = {"subset": self.config.subset, "splits": list(self.config.splits)}
        if self._local:
            files = [Path(file) for split in self._splits() for file in self._files(split)]
            return {**chosen, "files": file_hashes(files)}
        return {**chosen, "dataset": self.path, "revision": self.commit()}

    def commit(self) -> str:
        """The commit that `data.revision` names, asked for once; a whole commit needs no network."""
        revision = self.config.revision
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        from huggingface_hub import HfApi

        try:
            return str(HfApi().dataset_info(self.path, revision=revision, timeout=30).sha)
        except Exception as error:  # the hub's client raises many kinds
            raise UserError(_cannot(self.path, revision, error)) from error

    def rows(self) -> Iterator[Row]:
        """All rows of the splits in order.

        Raises:
            UserError: a file that cannot be read, or a split without rows.
        """
        for split in self._splits():
            number = 0
            for number, record in enumerate(self._split(split), 1):
                origin = f"{split}:{number}"
                yield Row(record, origin, f"{self.path} {split} row {number}", split)
            if number == 0:
                raise UserError(f"{self.path}: the split {split} holds no rows")

    def count(self) -> int | None:
        """Rows of the splits, if the data set's own description says so."""
        told = self._build().info.splits or {}
        splits = self._splits()
        return sum(told[split].num_examples for split in splits) if {*splits} <= {*told} else None

    def _split(self, split: str) -> Iterator[Any]:
        datasets = _datasets()
        files = self._files(split)
        lines = all(str(file).split("::")[0].lower().endswith(_LINES) for file in files)
        try:
            if lines:
                # A byte that is no UTF-8 becomes an escape that JSON does not know: that row alone is bad.
                stream = datasets.load_dataset(
                    "text",
                    data_files={"rows": files},
                    split="rows",
                    streaming=True,
                    encoding="utf-8-sig",
                    encoding_errors="backslashreplace",
                )
                for row in stream:
                    if row["text"].strip():
                        yield parse_line(row["text"])
            else:
                yield from self._build().as_streaming_dataset(split=split)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self.path}: the split {split} cannot be read ({_first_line(error)})"
            ) from error

    def _build(self) -> Any:
        if self._builder is None:
            revision = None if self._local else self.commit()
            try:
                self._builder = _datasets().load_dataset_builder(
                    self.path, name=self.config.subset, revision=revision
                )
            except UserError:
                raise
            except Exception as error:
                raise UserError(_cannot(self.path, self.config.revision, error)) from error
        return self._builder

    def _files(self, split: str) -> list[str]:
        return [str(file) for file in (self._build().config.data_files or {}).get(split, [])]

    def _splits(self) -> list[str]:
        known = [str(split) for split in (self._build().config.data_files or {})]
        missing = [split for split in self.config.splits if split not in known]
        if missing or not known:
            local = (
                "; a folder says in its README.md which files a split has (configs: data_files:), or read "
                f"them with data=jsonl data.path='{self.path}/**/*.jsonl'"
            )
            raise UserError(
                f"data.splits: {self.path} has no split {', '.join(missing)}; it has {', '.join(known)}"
                f"{local if self._local else ''}"
            )
        return list(self.config.splits) or known


def _datasets() -> Any:
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        import datasets
    except ImportError as error:
        raise UserError("data.source=hub needs `datasets`: pip install 'kvpop-lightning[hub]'") from error
    return datasets


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _cannot(path: str, revision: str | None, error: BaseException) -> str:
    return (
        f"data.path={path} (revision {revision}): no such data set can be reached ({_first_line(error)}); "
        "check the name and the network, or give the path of a local copy"
    )
