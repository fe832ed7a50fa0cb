"""`kvpop data stats | check | traces`: what the prepared rows hold, whether they are whole, new ones from the
model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvpop_lightning.commands import Call
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError

SUMMARY = "show what the prepared data holds, check that it is whole, or sample solutions from the model"
DETAILS = """stats: lengths, packing, mix of families, where the rows of a source went, how far solutions
    reach back to the facts, examples; also drawn, as RUN_DIR/data/stats.png beside stats.json. check:
    compares every shard with the hashes in its index. Rows that are missing are prepared first. traces: the
    model solves the problems of the data; what it finishes goes to data.traces.path, for data=teacher_traces.
    An interrupted call goes on."""
KEYS = (
    "data.source",
    "data.path",
    "data.row_length",
    "data.train_rows",
    "data.traces.path",
    "data.traces.problems",
    "data.traces.samples",
    "data.traces.temperature",
    "data.traces.top_p",
    "data.traces.max_new_tokens",
    "data.traces.slots",
    "data.cache_dir",
    "run_dir",
    "seed",
)
DEFAULT_EXPERIMENT: str | None = None

ACTIONS = ("stats", "check", "traces")


def take_words(words: Sequence[str]) -> tuple[list[str], str]:
    """Settings and the action.

    Raises:
        UserError: an unknown action.
    """
    from kvpop_lightning.config.choices import did_you_mean

    settings = [word for word in words if "=" in word]
    rest = [word for word in words if "=" not in word] or ["stats"]
    if len(rest) > 1 or rest[0] not in ACTIONS:
        raise UserError(f"kvpop data {' '.join(rest)}: unknown{did_you_mean(rest[-1], ACTIONS)}")
    return settings, rest[0]


def run(config: Config, call: Call) -> int:
    if call.own == "traces":
        return _traces(config)
    from kvpop_lightning.data import PackedMathDataModule, PackedRows, stats
    from kvpop_lightning.data.blocks import chosen_families
    from kvpop_lightning.data.reasoning import FAMILY
    from kvpop_lightning.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    data = PackedMathDataModule(config.data, tokenizer, seed=config.seed)
    data.prepare_data()
    names = ("eval",) if config.data.streaming else ("train", "eval")
    splits = {name: data.train_rows if name == "train" else data.eval_rows for name in names}
    if call.own == "check":
        for name, rows in splits.items():
            PackedRows(rows.folder, verify=True)
            print(f"{name}: {len(rows)} rows are whole ({rows.folder})")
        return 0
    found = {name: stats.split_stats(rows) for name, rows in splits.items()}
    print(f"data {data.fingerprint}")
    for name, part in found.items():
        print(stats.show(name, part))
    if config.data.source == "procedural":
        known = [n for s in ("train", "eval") for n in chosen_families(config.data, s) if n != FAMILY]
        found["distances"] = stats.reaches(config.data, list(dict.fromkeys(known)), tokenizer)
        print("tokens from a given fact to its uses:")
        for name, reach in found["distances"].items():
            print(f"    {name:<22} median {reach['median']:>5}  p90 {reach['p90']:>5}  max {reach['max']:>5}")
    for text in stats.examples(next(iter(splits.values())), tokenizer):
        print(f"{'-' * 40}\n{text}")
    for path in stats.write(Path(config.run_dir) / "data", {"fingerprint": data.fingerprint, **found}):
        print(path)
    return 0


def _traces(config: Config) -> int:
    from kvpop_lightning.data import traces
    from kvpop_lightning.models import load_model

    told = traces.sample(*load_model(config.model), config)
    ended = ", ".join(f"{name} {count}" for name, count in sorted(told.ended.items()))
    print(
        f"{told.path}: {told.ended['end']} finished traces of {config.model.name} ({ended}; {told.reused} "
        f"sampled before), {told.tokens} tokens sampled, {told.exact} come back token by token"
    )
    if told.ended["end"] == 0:
        print("none ended by itself, so there is nothing to train on: raise data.traces.max_new_tokens")
    return 0
