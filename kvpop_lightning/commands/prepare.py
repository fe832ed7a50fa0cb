"""`kvpop prepare`: weights and data, once, so that later commands start at once."""

from __future__ import annotations

from kvpop_lightning.commands import Call
from kvpop_lightning.config.schema import Config

SUMMARY = "convert the model's weights and pack the data"
DETAILS = """Every other command does this when it is needed; what is there already is reused. Data is
    packed into rows below data.cache_dir, in a folder named by a fingerprint of sources, settings and
    tokenizer. Only the tokenizer of the model is loaded. kvpop data stats shows what the rows hold."""
KEYS = (
    "model.source",
    "model.path",
    "data.source",
    "data.path",
    "data.eval_path",
    "data.families",
    "data.eval_families",
    "data.row_length",
    "data.train_rows",
    "data.eval_rows",
    "data.min_document_tokens",
    "data.max_document_tokens",
    "data.revision",
    "data.splits",
    "data.eval_share",
    "data.max_tokens",
    "data.tools",
    "data.decontaminate",
    "data.suites",
    "data.processes",
    "data.loss_on",
    "data.too_long",
    "data.on_bad_row",
    "data.cache_dir",
    "seed",
)
DEFAULT_EXPERIMENT: str | None = None


def run(config: Config, call: Call) -> int:
    from kvpop_lightning.data import PackedMathDataModule
    from kvpop_lightning.data.document_blocks import told
    from kvpop_lightning.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    data = PackedMathDataModule(config.data, tokenizer, seed=config.seed)
    data.prepare_data()
    data.setup("fit")
    if config.data.streaming:
        print(f"data {data.fingerprint}: training rows are streamed, {len(data.eval_rows)} evaluation rows")
        return 0
    identity = data.train_rows.index["description"]["identity"]
    if (commit := identity.get("revision", config.data.revision)) != config.data.revision:
        print(f"{config.data.path} {config.data.revision or ''} is {commit}: data.revision={commit} pins it")
    print(
        f"data {data.fingerprint}: {len(data.train_rows)} training rows, {len(data.eval_rows)} evaluation "
        "rows"
    )
    for name, rows in (("train", data.train_rows), ("eval", data.eval_rows)):
        for line in told(rows.index):
            print(f"{name}: {line}")
    return 0
