"""The command line: help, mistakes as one line, exit statuses, nothing written before all is well."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from kvpop_lightning import cli
from kvpop_lightning.cli import main
from kvpop_lightning.commands import COMMANDS, Call, load_command
from kvpop_lightning.config import compose, to_yaml
from kvpop_lightning.config.compose import OWN_KEYS
from kvpop_lightning.config.describe import settings
from kvpop_lightning.config.schema import Config
from kvpop_lightning.errors import Terminated, UserError
from kvpop_lightning.signals import sigterm_interrupts

HEAVY = ("torch", "lightning", "transformers", "mlflow", "numpy", "matplotlib", "pyarrow")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("KVPOP_TRACEBACK", raising=False)
    return tmp_path


def stand_in(monkeypatch: pytest.MonkeyPatch, run, name: str = "train") -> None:  # type: ignore[no-untyped-def]
    """Replaces a command's work."""
    monkeypatch.setattr(load_command(name), "run", run)


@pytest.mark.parametrize(
    "words",
    [
        ["trian"],
        ["train", "policy.budget.topkk=3"],
        ["train", "foo"],
        ["train", "policy.budget.topk=abc"],
        ["train", "policy.budget.topk=0"],
        ["train", "policy.budget.topk=-1"],
        ["train", "policy.budget.window=300"],
        ["train", "policy.decay=0"],
        ["train", "policy.decay=1.5"],
        ["train", "policy=nothing"],
        ["train", "policy=random"],
        ["train", "experiment=nothing"],
        ["train", "--prin-config"],
        ["train", "--seed=1"],
        ["train", "distill.target.source=student"],
        ["--print-config"],
        ["generate"],
        ["generate", "prompt=a", "policy=oracle"],
        ["ui", "tracking.uri=mlruns"],
        ["ui"],
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_several_mistakes_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "policy.budget.topk=0", "policy.decay=0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("error: policy.") for line in lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    command = load_command(name)
    assert command.SUMMARY in text
    assert set(command.KEYS) <= set(settings())
    for key in command.KEYS:
        shown = key.removeprefix(f"{OWN_KEYS.get(name)}.")
        line = next(line for line in text.splitlines() if line.startswith(f"  {shown}  "))
        assert json.dumps(settings()[key].default) in line
    assert "policy=" in text
    assert "kvpop_mlstm" in text


def test_overview_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"]):
        assert main(words) == 0
        text = capsys.readouterr().out
        assert all(f"  {name}" in text for name in COMMANDS)
    assert main(["--version"]) == 0


def test_every_setting_says_what_it_means() -> None:
    assert [key for key, setting in settings().items() if not setting.doc] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_print_config_is_the_composed_configuration(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--print-config", "seed=5"]) == 0
    text = capsys.readouterr().out
    default = load_command(name).DEFAULT_EXPERIMENT
    assert text == to_yaml(compose(["seed=5"], command=name, default_experiment=default))
    assert yaml.safe_load(text)["seed"] == 5


def test_print_config_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, lambda config, call: pytest.fail("the command ran"))
    assert main(["train", "--print-config", "experiment=demo"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_command_gets_the_configuration_and_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Config, Call]] = []
    stand_in(monkeypatch, lambda config, call: seen.append((config, call)) or 0)
    assert main(["train", "seed=4", "policy=kvpop_mlstm"]) == 0
    [(config, call)] = seen
    assert (config.seed, config.policy.name) == (4, "kvpop_mlstm")
    assert call == Call("train", ("seed=4", "policy=kvpop_mlstm"))


@pytest.mark.parametrize("prompt", ["What is x if x=5?", "--help me", "-", "plain"])
def test_a_prompt_may_look_like_something_else(prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    stand_in(monkeypatch, lambda config, call: seen.append(config) or 0, "generate")
    assert main(["generate", prompt, "temperature=0.25"]) == 0
    assert (seen[0].generate.prompt, seen[0].generate.temperature) == (prompt, 0.25)


def test_demo_takes_its_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    stand_in(monkeypatch, lambda config, call: seen.append(config) or 0, "demo")
    assert main(["demo"]) == 0
    assert main(["demo", "experiment=smoke"]) == 0
    assert [config.experiment for config in seen] == ["demo", "smoke"]


def raiser(error: BaseException):  # type: ignore[no-untyped-def]
    def run(config: Config, call: Call) -> int:
        raise error

    return run


def wrapped(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status", "parts"),
    [
        (UserError("data.path=x: no such file"), 2, ["error: data.path=x: no such file"]),
        (UserError("two\nlines"), 2, ["error: two lines"]),
        (KeyboardInterrupt(), 130, ["interrupted", "same command", "kvpop train seed=1"]),
        (Terminated(), 143, ["terminated", "kvpop train seed=1"]),
        (
            OSError(errno.ENOSPC, "No space left on device", "a/b.bin"),
            2,
            ["no space left", "a/b.bin", "run_dir"],
        ),
        (wrapped(RuntimeError("x"), OSError(errno.ENOSPC, "full")), 2, ["no space left"]),
        (RuntimeError("[enforce fail] No space left on device"), 2, ["no space left"]),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "w.gguf"),
            2,
            ["w.gguf", "no such file"],
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, ["/x", "permission denied"]),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    error: BaseException,
    status: int,
    parts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stand_in(monkeypatch, raiser(error))
    assert main(["train", "seed=1"]) == status
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), KeyError("a bug"), ValueError("a bug"), OSError("a bug")]
)
def test_a_fault_of_the_program_shows_its_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, raiser(error))
    assert main(["train"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "a bug" in err


def test_value_error_of_our_own_code_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvpop_lightning.policy.budget import Budget

    stand_in(monkeypatch, lambda config, call: Budget(4, 0, 1))
    assert main(["train"]) == 2
    assert capsys.readouterr().err.startswith("error: budget.window")
    monkeypatch.setenv("KVPOP_TRACEBACK", "1")
    assert main(["train"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_lightnings_exit_after_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: Config, call: Call) -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    stand_in(monkeypatch, run)
    assert main(["train"]) == 130
    stand_in(monkeypatch, lambda config, call: sys.exit(3))
    assert main(["train"]) == 3


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["train", "policy.decay=7"]])
def test_help_and_mistakes_import_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "kvpop_lightning.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode in (0, 2)
    imported = {
        line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line
    }
    assert "omegaconf" in imported
    assert not imported & set(HEAVY)


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m kvpop_lightning.cli train --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("kvpop train")
    assert done.stderr == ""


@pytest.mark.parametrize(("number", "status", "word"), [(signal.SIGINT, 130, "interrupted")])
def test_an_interruption_says_how_to_go_on(number: int, status: int, word: str, tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from kvpop_lightning import cli\n"
        "from kvpop_lightning.commands import train\n"
        "train.run = lambda config, call: (print('running', flush=True), time.sleep(30))\n"
        "sys.exit(cli.main(['train', 'seed=3']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    time.sleep(0.1)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == status
    assert err == f"{word}: run the same command again to go on from where it stopped (kvpop train seed=3)\n"


def test_ui_starts_mlflow_on_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("kvpop_lightning.commands.ui.serve", lambda words, ports: started.extend(words) or 0)
    assert main(["ui", "tracking.uri=http://ann:secret@host:5000"]) == 0
    assert capsys.readouterr().out == "open http://***@host:5000\n"
    (tmp_path / "mlflow.db").touch()
    main(["ui", "tracking.port=5055"])
    [words] = started
    assert words[words.index("--backend-store-uri") + 1] == f"sqlite:///{tmp_path}/mlflow.db"
    assert words[words.index("--port") + 1] == "5055"


def test_evaluation_results_reach_the_run(tmp_path: Path) -> None:
    from kvpop_lightning.commands.evaluate import keep_result

    class Recorder:
        def __init__(self) -> None:
            self.metrics: dict[tuple[str, int], float] = {}
            self.files: list[tuple[str, str | None]] = []

        def log_artifact(self, path: Path, folder: str | None = None) -> None:
            self.files.append((path.name, folder))

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.metrics |= {(name, step): value for name, value in metrics.items()}

    row = {
        "policy": "random+decay",
        "budget": 64,
        "kl": 0.5,
        "top1": 0.25,
        "perplexity": 3.0,
        "bytes_held": 10,
    }
    run = Recorder()
    keep_result(run, SimpleNamespace(artifacts=[tmp_path / "table.json", tmp_path / "kl.png"], table=[row]))
    assert run.files == [("table.json", None), ("kl.png", "figures")]
    assert run.metrics["eval/kl/random+decay", 64] == 0.5


def test_module_runs_as_a_script() -> None:
    assert isinstance(cli, ModuleType)
    done = subprocess.run(
        [sys.executable, "-m", "kvpop_lightning.cli", "nope"], capture_output=True, text=True
    )
    assert done.returncode == 2


@pytest.mark.parametrize("key", ["run_dir", "data.cache_dir", "model.cache_dir", "trainer.feature_cache_dir"])
def test_a_file_in_place_of_a_folder_is_refused_before_the_libraries_load(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpop_lightning.cli._set_up_process", lambda: pytest.fail("went on"))
    file = tmp_path / "notes"
    file.write_text("")
    assert main(["train", "experiment=demo", f"{key}={file}/below"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {key}={file}/below: {file} is a file, not a folder; name another"
    ]


def test_a_missing_model_folder_is_refused_before_the_libraries_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpop_lightning.cli._set_up_process", lambda: pytest.fail("went on"))
    assert main(["train", "model.source=path", f"model.path={tmp_path}/none"]) == 2
    assert f"model.path={tmp_path}/none is not a folder" in capsys.readouterr().err


def test_sigterm_interrupts_once_and_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[str] = []
    with pytest.raises(Terminated), sigterm_interrupts():  # noqa: PT012  (the block is a program)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # an impatient second one
            time.sleep(0.05)
            seen.append("cleaned up")
    assert seen == ["cleaned up"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_fork_dies_of_sigterm_as_usual() -> None:
    with sigterm_interrupts():
        pid = os.fork()
        if pid == 0:
            try:
                time.sleep(30)
            finally:
                os._exit(7)
        time.sleep(0.2)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
