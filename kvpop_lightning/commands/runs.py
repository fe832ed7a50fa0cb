"""`kvpop runs ...`: find, read and compare what was run; register the best; send what a server missed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvpop_lightning.commands import Call
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import UserError

SUMMARY = "find, show and compare runs, register the best one"
DETAILS = """list: runs, newest first. show RUN: its settings that differ from the defaults, its last metrics,
    where its files are. compare RUN RUN...: what differs, metrics side by side. best --metric NAME: the run
    with the best value. register RUN --name NAME: its policy into the model registry. send [FOLDER...]:
    what a tracking server missed while it was away, from the run folders (default: all under runs/).

    RUN is a run's id, the beginning of one, or its name. list and best take --experiment NAME, --sweep NAME,
    --state finished, --where "params.policy.budget.topk = 92" (MLflow's filter), --limit N; list takes
    --sort NAME (a metric, params.NAME, started; --ascending, --descending) and --columns NAME,NAME;
    best takes --direction min or max; list, show, compare and best print JSON with --json.

    Read is the store of tracking.uri, or, where there is none, the run folders under runs/ and run_dir."""
KEYS = ("tracking.uri", "run_dir")
DEFAULT_EXPERIMENT: str | None = None

ACTIONS = ("list", "show", "compare", "best", "register", "send")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"kvpop runs: {message} (kvpop runs --help)")


def take_words(words: Sequence[str]) -> tuple[list[str], argparse.Namespace]:
    """Settings (`tracking.uri=...`) and the rest, parsed.

    Raises:
        UserError: an unknown action or option.
    """
    parser = _Parser(prog="kvpop runs", add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    for option in ("experiment", "sweep", "state", "where", "sort", "columns", "metric", "name", "policy"):
        parser.add_argument(f"--{option}")
    parser.add_argument("--direction", choices=("min", "max"))
    parser.add_argument("--limit", type=int)
    for switch in ("json", "ascending", "descending"):
        parser.add_argument(f"--{switch}", action="store_true")
    own = parser.parse_intermixed_args(list(words))
    settings = [word for word in own.words if "=" in word and not Path(word).exists()]
    rest = [word for word in own.words if word not in settings]
    own.action, own.runs = (rest[0], rest[1:]) if rest else ("list", [])
    _check(own)
    return settings, own


def _check(own: argparse.Namespace) -> None:
    from kvpop_lightning.config.choices import did_you_mean

    if own.action not in ACTIONS:
        raise UserError(f"kvpop runs {own.action}: unknown{did_you_mean(own.action, ACTIONS)}")
    number = len(own.runs)
    wanted = {"show": number == 1, "register": number == 1, "compare": number >= 2}
    if not wanted.get(own.action, own.action == "send" or number == 0):
        how = {"show": "show RUN", "register": "register RUN --name NAME", "compare": "compare RUN RUN..."}
        raise UserError(f"write kvpop runs {how.get(own.action, own.action)}")
    if own.action == "best" and not own.metric:
        raise UserError("best by which metric? kvpop runs best --metric kl")
    if own.action == "register" and not own.name:
        raise UserError("under which name? kvpop runs register RUN --name NAME")
    if own.limit is not None and own.limit < 1:
        raise UserError(f"--limit {own.limit}: at least 1")


def run(config: Config, call: Call) -> int:
    from kvpop_lightning.config.files import project_folder
    from kvpop_lightning.tracking.read import Query, Runs

    own: Any = call.own
    folders = list(dict.fromkeys((project_folder() / "runs", Path(config.run_dir).resolve())))
    if own.action == "send":
        return _send(config, [Path(name) for name in own.runs] or folders)
    from kvpop_lightning.commands import runs_show as screen

    runs = Runs(config.tracking.uri, folders)
    query = Query(own.experiment, own.sweep, own.state, own.where)
    if own.action == "list":
        found = screen.in_order(
            runs.find(query), own.sort, ascending=own.ascending, descending=own.descending
        )
        screen.show_list(found, runs.source, own)
    elif own.action == "show":
        record = runs.one(own.runs[0])
        screen.show_run(record, runs.artifact_names(record), runs.source, as_json=own.json)
    elif own.action == "compare":
        screen.show_comparison([runs.one(name) for name in own.runs], as_json=own.json)
    elif own.action == "best":
        screen.show_best(runs.find(query), own)
    else:
        _register(runs, own)
    return 0


def _register(runs: Any, own: Any) -> None:
    """The policy that a run trained, from its folder or, if that is elsewhere, from its artifacts."""
    import tempfile

    from kvpop_lightning.tracking.registry import register_policy

    record = runs.one(own.runs[0])
    if runs.client is None:
        raise UserError(f"the registry needs a tracking server or database: {runs.missing}")
    policy = own.policy or record.params.get("policy.name", "")
    folder = Path(record.params.get("run_dir", "")) / "policy" / policy
    with tempfile.TemporaryDirectory() as temporary:
        if not (folder / "kvpop.json").is_file():
            if f"policy/{policy}/kvpop.json" not in runs.artifact_names(record):
                raise UserError(
                    f"run {record.id[:8]} trained no policy {policy} that is still there ({folder}): "
                    "give --policy NAME, or a run of kvpop train"
                )
            import mlflow.artifacts

            folder = Path(
                mlflow.artifacts.download_artifacts(
                    run_id=record.id,
                    artifact_path=f"policy/{policy}",
                    dst_path=temporary,
                    tracking_uri=runs.uri,
                )
            )
        done = register_policy(record.id, folder, own.name, uri=runs.uri)
    print(f"{done.uri} {'is this policy already' if done.reused else 'registered'} (run {record.id[:8]})")


def _send(config: Config, roots: Sequence[Path]) -> int:
    from kvpop_lightning.tracking.naming import public_uri
    from kvpop_lightning.tracking.outbox import folders_with_outbox
    from kvpop_lightning.tracking.send import Sent, send_folder
    from kvpop_lightning.tracking.store import tracking_uri, unreachable

    uri = tracking_uri(config.tracking.uri)
    for root in roots:
        if not root.is_dir() and root != Path(config.run_dir).resolve() and root.name != "runs":
            raise UserError(f"{root} is no folder")
    folders = list(dict.fromkeys(folder for root in roots for folder in folders_with_outbox(root)))
    if not folders:
        print("nothing waits to be sent")
        return 0
    if reason := unreachable(uri):
        raise UserError(reason)
    sent = Sent()
    for folder in folders:
        send_folder(folder, uri, sent)
    for label in sent.runs:
        print(f"sent {label}")
    for label in sent.left:
        print(f"left {label}")
    print(f"{len(sent.runs)} runs, {sent.metrics} metric values to {public_uri(uri)}")
    return int(bool(sent.left))
