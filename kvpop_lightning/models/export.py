"""A folder to hand on: base, policy and tokenizer, with a model card that says what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvpop_lightning.errors import UserError
from kvpop_lightning.models.context import runtime_of
from kvpop_lightning.models.files import move_into, staging
from kvpop_lightning.models.persist import CONFIG, CONFIG_KEY, DESCRIPTION, save

CARD = "README.md"


def export(
    model: Any, tokenizer: Any, path: str | Path, *, table: str | Path | None = None,
    base_weights: bool = True,
) -> Path:  # fmt: skip
    """Writes a retrofitted model for others: safetensors, policy in `config.json`, tokenizer, model card.

    `transformers.from_pretrained` reads the folder as the plain base, `kvpop_lightning.load` as the
    retrofitted model.

    Args:
        model: retrofitted.
        tokenizer: written beside it; None = none.
        path: folder; other files in it stay.
        table: `table.json` of an evaluation; the card takes this policy's figures from it. None = the card
            says that nothing was measured.
        base_weights: write the base's weights; False = only if they changed, else the base is named.

    Raises:
        UserError: a table that cannot be read, no space left, or a place that cannot be written.
    """
    path = Path(path)
    if path.is_file():
        raise UserError(f"export.path {path} is a file: give a folder")
    entries = [] if table is None else _entries(Path(table))
    runtime_of(model)  # refuses a plain model
    with staging(path) as stage:
        save(model, stage, base_weights=True if base_weights else None)
        if tokenizer is not None:
            tokenizer.save_pretrained(stage)
        description = _anywhere(stage / DESCRIPTION)
        config_file = stage / CONFIG
        config = json.loads(config_file.read_text()) if config_file.is_file() else model.config.to_dict()
        # `retrofit` runs the base under an attention of its own name, which the plain base does not know.
        config.pop("_attn_implementation", None)
        config[CONFIG_KEY] = {key: description[key] for key in ("format", "policy")}
        config_file.write_text(json.dumps(config, indent=2, default=str) + "\n")
        (stage / CARD).write_text(model_card(model, entries))
        move_into(stage, path, last=DESCRIPTION)
    return path


def _anywhere(file: Path) -> dict[str, Any]:
    """The description without paths of this machine, where the folder holds the base itself."""
    description: dict[str, Any] = json.loads(file.read_text())
    base = description["base"]
    if base["weights"]:
        base["origin"] = None
        base["name"] = base["name"] and _short(base["name"])
        file.write_text(json.dumps(description, indent=1) + "\n")
    return description


def _short(name: str) -> str:
    """A hub id as it is, of a folder's path the last part."""
    return Path(name).name if Path(name).is_absolute() else name


def _entries(file: Path) -> list[dict[str, Any]]:
    try:
        entries = json.loads(file.read_text())
        assert isinstance(entries, list)
        assert all({"policy", "budget"} <= entry.keys() for entry in entries)
    except (OSError, ValueError, AttributeError, AssertionError) as error:
        raise UserError(f"export.table {file} is no table.json of kvpop evaluate: {error}") from error
    return entries


def model_card(model: Any, entries: list[dict[str, Any]]) -> str:
    """The folder's README.md; figures only from `entries`, the objects of a `table.json`."""
    runtime = runtime_of(model)
    policy, base = runtime.policy, runtime.base
    budget = policy.budget
    name = _short(base.get("name") or type(model).__name__)
    measured = [e for e in entries if e["policy"] == policy.name and e.get("kl") is not None]
    lines = [
        "---", "library_name: kvpop_lightning", "tags: [kv-cache, kvpop]", "---",
        f"# {name} with a bounded KV cache",
        "",
        f"Policy `{policy.name}`: every KV head keeps at most {budget.total} keys, {budget.sink} sinks, the "
        f"{budget.window} most recent tokens and {budget.topk} chosen by priority, however long the text.",
        f"{policy.bytes_per_sequence():,} bytes a sequence at 2 bytes per element, in all layers.",
        "",
        "```python",
        "from transformers import AutoTokenizer",
        "from kvpop_lightning import BoundedCache, load",
        "",
        'model, tokenizer = load("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")',
        'inputs = tokenizer("...", return_tensors="pt").to(model.device)',
        "model.generate(**inputs, past_key_values=BoundedCache(model))",
        "```",
        "",
        "`AutoModelForCausalLM.from_pretrained` reads the same folder as the plain base model; "
        f"`kvpop generate model.source=path model.path=FOLDER policy={policy.name}` writes text with it.",
        "",
        "## Measured",
        "",
    ]  # fmt: skip
    if not measured:
        return "\n".join([*lines, "Not measured: no evaluation of this policy was at hand."]) + "\n"
    rows = max(len(e.get("rows", ())) for e in measured)
    full = next((e for e in entries if e["policy"] == "full" and e.get("perplexity") is not None), None)
    lines += [
        f"On {rows} held-out rows; KL to the dense model in nats per token, agreement of the likeliest token "
        "with the dense model's.",
        "",
        "| keys per KV head | KL | top-1 agreement | perplexity |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {e['budget']} | {e['kl']:.4f} | {e['top1']:.1%} | {e['perplexity']:.3f} |"
        for e in sorted(measured, key=lambda e: -e["budget"])
    ]
    if full is not None:
        lines.append(f"| all (dense) | 0 | 100.0% | {full['perplexity']:.3f} |")
    if budget.total not in [e["budget"] for e in measured]:
        lines += ["", f"Not measured at this policy's own {budget.total} keys."]
    return "\n".join(lines) + "\n"
