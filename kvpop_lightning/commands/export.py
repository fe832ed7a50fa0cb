"""`kvpop export FOLDER`: the retrofitted model as a folder to hand on."""

from __future__ import annotations

from pathlib import Path

from kvpop_lightning.commands import Call
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError

SUMMARY = "write the retrofitted model as a folder that others load: kvpop export FOLDER"
DETAILS = """The policy trained in RUN_DIR/policy/NAME (else the one configured, with a warning if it would
    need training), the base's weights, the tokenizer, and a model card whose figures come from
    RUN_DIR/table.json; without one it says that nothing was measured. kvpop_lightning.load reads the folder
    as the retrofitted model, transformers' from_pretrained as the plain base."""
KEYS = (
    "export.path",
    "export.base_weights",
    "export.table",
    "policy.name",
    "policy.budget.topk",
    "model.source",
    "model.path",
    "run_dir",
)
DEFAULT_EXPERIMENT: str | None = None
ARGUMENT = "export.path"


def run(config: Config, call: Call) -> int:
    if config.policy.name in ("full", "oracle"):
        raise UserError(f"policy.name={config.policy.name} has no bounded cache to export: choose another")
    run_dir = Path(config.run_dir)
    table = config.export.table
    if table is None and (run_dir / "table.json").is_file():
        table = str(run_dir / "table.json")

    from kvpop_lightning.commands.generate import with_cache_policy
    from kvpop_lightning.models import load_model
    from kvpop_lightning.models.export import export

    model, tokenizer = load_model(config.model)
    model = with_cache_policy(model, config)
    path = Path(config.export.path or run_dir / "export" / config.policy.name)
    before = [file.name for file in path.iterdir()] if path.is_dir() else []
    folder = export(model, tokenizer, path, table=table, base_weights=config.export.base_weights)
    if before:
        print(f"{folder} was not empty: files of the same name are replaced, others stay")
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    print(f"{folder}: {config.policy.name}, {model.kvpop.budget.total} keys a head, {size / 2**20:.1f} MiB")
    print(f"figures in its README.md: {table or 'none, not measured'}")
    return 0
