"""The settings of the data, in the form of `schema.py`, which holds all others."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TracesConfig:
    path: str | None = None
    """JSONL file of traces sampled from the model (`kvpop data traces`); None = `run_dir/traces.jsonl`."""
    problems: int | None = 100
    """Problems of `data` to solve, at most; None = all of a file's or hub data set's."""
    samples: int = 1
    """Solutions of each problem."""
    temperature: float = 0.6
    """0 = greedy."""
    top_p: float = 0.95
    """Share of the probability mass to sample from."""
    max_new_tokens: int = 4096
    """Longest trace; one that is cut here is counted and left out."""
    slots: int = 8
    """Solutions written at a time."""


@dataclass(frozen=True)
class DataConfig:
    name: str = "procedural"
    """Name shown in tables and logs."""
    source: str = "procedural"
    """`procedural`, files (`jsonl`, `parquet`, `arrow`), or `hub`: chats from the hub, streamed."""
    path: str | None = None
    """File or glob; for `hub` a dataset's id, or a local folder of the same layout."""
    eval_path: str | None = None
    """Separate evaluation file; without it documents are split by hash, `eval_share` for evaluation."""
    eval_share: float = 0.1
    """Share of the problems of files and hub data sets kept for evaluation, by the hash of the problem."""
    revision: str | None = None
    """Of a hub data set: a commit, or a name that is resolved to one; part of the fingerprint."""
    subset: str | None = None
    """Of a hub data set with several configurations: its name."""
    splits: list[str] = field(default_factory=list)
    """Splits of a hub data set, read in this order; empty = all of them."""
    tools: str = "keep"
    """Rows of files and hubs in which tools are offered or called: `keep` or `drop` (counted)."""
    require_answer: bool = False
    """Leave out (and count) rows of files and hubs without `expected_answer` or `answer`."""
    max_tokens: int | None = None
    """Leave out (and count) longer documents of files and hubs, in tokens of the model's tokenizer."""
    decontaminate: str = "remove"
    """Training documents of files and hubs that share `ngram` words in a row with a problem of `suites` or
    `eval_path`: `remove`, `report` (count and list only) or `off`."""
    suites: list[str] = field(default_factory=list)
    """Files (JSONL, Parquet or Arrow) of the evaluation problems that training must not contain."""
    ngram: int = 13
    """Words of an overlap; a shorter problem counts as a whole."""
    families: list[str] = field(default_factory=lambda: ["all"])
    """Procedural families to train on; `all` = every family not held out."""
    eval_families: list[str] = field(default_factory=lambda: ["held_out"])
    """Families of the evaluation rows; `held_out` = those no training row is drawn from."""
    row_length: int = 1024
    """Tokens per packed row (T)."""
    train_rows: int | None = 20
    """Packed rows to train on, at most; None = all that a file or hub data set gives."""
    eval_rows: int = 4
    """Held-out rows."""
    min_document_tokens: int = 300
    """Shortest document that is generated."""
    max_document_tokens: int = 4096
    """Longest document that is generated, up to the step that crosses it."""
    eval_single_document: bool = True
    """Each evaluation row is one document of at least `row_length` tokens, cut to it."""
    loss_on: str = "assistant"
    """Which tokens are supervised: `assistant` or `all`."""
    on_bad_row: str = "error"
    """`error` names file and line and stops; `skip` counts and goes on."""
    too_long: str = "truncate"
    """A document longer than a row: `truncate`, `drop` or `split`; counted."""
    seed: int = 0
    """Seed of the generated documents and of the split."""
    streaming: bool = False
    """Pack on the fly without preparing rows (resume restarts the stream at the recorded document)."""
    workers: int = 0
    """DataLoader workers."""
    processes: int = 1
    """Processes that write and tokenise documents while preparing; the rows do not depend on it."""
    window: int = 1024
    """Documents of files and hubs that are shuffled and packed together."""
    traces: TracesConfig = field(default_factory=TracesConfig)
    """What `kvpop data traces` samples."""
    cache_dir: str = ".cache/data"
    """Where packed rows are kept, in a folder per fingerprint."""
