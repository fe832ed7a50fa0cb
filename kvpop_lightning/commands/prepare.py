"""`kvpop prepare`: weights and data, once, so that later commands start at once."""

from __future__ import annotations

from kvpop_lightning.commands import Call
from kvpop_lightning.config.schema import Config

SUMMARY = "convert the model's weights and pack the data"
DETAILS = """Every other command does this when it is needed; what is there already is reused. Data is
    packed into rows below data.cache_dir, in a folder named by a fingerprint of sources, settings and
    tokenizer."""
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
    "data.loss_on",
    "data.too_long",
    "data.on_bad_row",
    "data.cache_dir",
    "seed",
)
DEFAULT_EXPERIMENT: str | None = None


def run(config: Config, call: Call) -> int:
    from kvpop_lightning.data import PackedMathDataModule
    from kvpop_lightning.models import load_model

    _, tokenizer = load_model(config.model)
    data = PackedMathDataModule(config.data, tokenizer, seed=config.seed)
    data.prepare_data()
    data.setup("fit")
    print(
        f"data {data.fingerprint}: {len(data.train_rows)} training rows, {len(data.eval_rows)} evaluation "
        "rows"
    )
    return 0
