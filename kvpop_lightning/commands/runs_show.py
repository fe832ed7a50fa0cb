"""Tables and JSON of `kvpop runs`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from kvpop_lightning.config.choices import did_you_mean
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError
from kvpop_lightning.tracking.naming import flat_params
from kvpop_lightning.tracking.read import Record

SHOWN_METRICS = ("kl", "rescored/kl", "train/loss", "final/boundary_accuracy", "throughput/tokens_per_s")
"""Columns of `list`, as far as some run has them."""
HIGHER_IS_BETTER = ("accuracy", "top1", "correlation", "_per_s", "mfu", "tflops", "retained")
DEFAULT_LIMIT = 30


def in_order(
    records: list[Record], sort: str | None, *, ascending: bool = False, descending: bool = False
) -> list[Record]:
    """Sorted by a metric, `params.NAME` (as numbers where they are), or `started`; runs without it last.

    Raises:
        UserError: no run has it.
    """
    if sort in (None, "started"):
        return records[::-1] if ascending else records
    values = {record.id: _value(record, str(sort)) for record in records}
    have = [record for record in records if values[record.id] is not None]
    if records and not have:
        known = sorted({name for record in records for name in record.metrics})
        like = [name for name in known if str(sort) in name] or known
        some = ", ".join(like[:12]) + (" ..." if len(like) > 12 else "")
        raise UserError(
            f"no run has {sort}{did_you_mean(str(sort), known)}; there are {some or 'no metrics'}"
        )
    numbers = all(isinstance(values[record.id], float) for record in have)

    def key(record: Record) -> Any:
        value = values[record.id]
        return value if numbers else str(value)

    down = descending or (not ascending and direction_of(str(sort)) == "max")
    return [*sorted(have, key=key, reverse=down), *(r for r in records if values[r.id] is None)]


def direction_of(metric: str) -> str:
    """`max` for accuracies, agreements, rates; else `min`."""
    return "max" if any(part in metric for part in HIGHER_IS_BETTER) else "min"


def _value(record: Record, name: str) -> float | str | None:
    if name.startswith("params."):
        text = record.params.get(name.removeprefix("params."))
        try:
            return None if text is None else float(text)
        except ValueError:
            return text
    if name.startswith("tags."):
        return record.tags.get(name.removeprefix("tags."))
    value = record.metrics.get(name.removeprefix("metrics."))
    return None if value is None or math.isnan(value) else value


def show_list(records: Sequence[Record], source: str, own: Any) -> None:
    limit = own.limit or DEFAULT_LIMIT
    shown = records[:limit]
    if own.json:
        print(json.dumps([record.to_dict() for record in (records[: own.limit] if own.limit else records)]))
        return
    known = {name for record in shown for name in record.metrics}
    columns = own.columns.split(",") if own.columns else [name for name in SHOWN_METRICS if name in known]
    if own.sort and own.sort != "started" and own.sort not in columns:
        columns.append(own.sort)
    table = _table("id", "name", "state", "started", "took", *columns, numbers=columns)
    for record in shown:
        table.add_row(
            record.id[:8] if len(record.id) == 32 else record.id,
            record.name,
            record.state.lower(),
            _when(record),
            _took(record),
            *(_text(_value(record, name)) for name in columns),
        )
    _print(table)
    more = f", {len(records) - limit} more (--limit)" if len(records) > limit else ""
    print(f"{len(shown)} runs of {source}{more}")


def show_run(record: Record, artifacts: Sequence[str], source: str, *, as_json: bool) -> None:
    defaults = flat_params(asdict(Config()))
    changed = {
        name: {"value": text, "default": defaults.get(name)}
        for name, text in sorted(record.params.items())
        if text != defaults.get(name)
    }
    if as_json:
        print(json.dumps(record.to_dict() | {"changed": changed, "artifact_files": list(artifacts)}))
        return
    print(f"{record.name}  {record.state.lower()}  {_when(record)}  {_took(record)}")
    print(f"id {record.id}, experiment {record.experiment}, in {source}")
    for title, rows in (
        (
            "settings that differ from the defaults",
            [(n, c["value"], c["default"]) for n, c in changed.items()],
        ),
        ("last metrics", [(n, _text(v)) for n, v in sorted(record.metrics.items())]),
        ("tags", [(n, t) for n, t in sorted(record.tags.items()) if not n.startswith("mlflow.")]),
    ):
        if rows:
            table = _table(
                *(["setting", "value", "default"] if len(rows[0]) == 3 else [title, ""]), title=title
            )
            for row in rows:
                table.add_row(*(str(cell) for cell in row))
            _print(table)
    print(f"run folder {record.params.get('run_dir', 'unknown')}")
    print(f"artifacts {record.artifacts}")
    for name in artifacts:
        print(f"  {name}")


def show_comparison(records: Sequence[Record], *, as_json: bool) -> None:
    """Parameters that differ, and every metric that any of them has."""
    params = sorted({name for record in records for name in record.params})
    differing = {
        name: [record.params.get(name) for record in records]
        for name in params
        if len({record.params.get(name) for record in records}) > 1
    }
    names = sorted({name for r in records for name in r.metrics if not name.startswith("system/")})
    metrics = {name: [record.metrics.get(name) for record in records] for name in names}
    if as_json:
        clean = {n: [v if v is None or math.isfinite(v) else str(v) for v in vs] for n, vs in metrics.items()}
        print(json.dumps({"runs": [r.id for r in records], "params": differing, "metrics": clean}))
        return
    table = _table("", *(f"{record.name}\n{record.id[:8]}" for record in records))
    for name, texts in differing.items():
        table.add_row(name, *("" if text is None else text for text in texts))
    table.add_section()
    for name, values in metrics.items():
        table.add_row(name, *(_text(value) for value in values))
    _print(table)
    print(f"{len(params) - len(differing)} further settings are the same")


def show_best(records: Sequence[Record], own: Any) -> None:
    """Raises UserError where no run has the metric."""
    direction = own.direction or direction_of(own.metric)
    # A sweep's confirming trainings are measured otherwise than its trials (more rows, other seeds).
    asked = any("confirm" in clause for clause in own.where or ())
    records = [record for record in records if asked or "confirm" not in record.tags]
    ordered = in_order(list(records), own.metric, ascending=direction == "min", descending=direction == "max")
    if not ordered:
        raise UserError("no run fits the filter")
    best = ordered[0]
    value = _value(best, own.metric)
    if own.json:
        print(json.dumps(best.to_dict() | {"metric": own.metric, "direction": direction, "value": value}))
        return
    table = _table("id", "name", own.metric, "state", numbers=[own.metric])
    for record in [record for record in ordered if _value(record, own.metric) is not None][: own.limit or 5]:
        table.add_row(record.id[:8], record.name, _text(_value(record, own.metric)), record.state.lower())
    _print(table)
    print(f"best by {own.metric} ({direction}): {best.id}  {best.name}")


def _table(*columns: str, numbers: Sequence[str] = (), title: str | None = None) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return table


def _print(table: Any) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:  # for a file or a pipe nothing is folded
        console = Console(markup=False, highlight=False, width=400)
    console.print(table)


def _text(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.5g}"


def _when(record: Record) -> str:
    if not record.started_ms:
        return ""
    return datetime.fromtimestamp(record.started_ms / 1000).strftime("%Y-%m-%d %H:%M")


def _took(record: Record) -> str:
    if not record.started_ms or not record.ended_ms:
        return ""
    seconds = (record.ended_ms - record.started_ms) / 1000
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
