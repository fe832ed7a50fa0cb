"""`kvpop data stats` and `check` on real rows, the tokenizer alone, and a disk that is really full."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvpop_lightning.cli import main
from kvpop_lightning.config.schema import ModelConfig
from kvpop_lightning.data import stats
from kvpop_lightning.data.chat import tokenizer_fingerprint
from kvpop_lightning.data.prepare import prepare
from kvpop_lightning.errors import UserError
from kvpop_lightning.models import load_model
from kvpop_lightning.models.tiny import tiny_tokenizer
from kvpop_lightning.models.tokenizer import load_tokenizer


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return [
        "model=tiny_llama", f"run_dir={tmp_path}/run", f"data.cache_dir={tmp_path}/cache",
        "data.row_length=512", "data.families=[ledger,codebook]", "data.eval_families=[road_trips]",
        "data.train_rows=5", "data.eval_rows=2", "data.min_document_tokens=100",
        "data.max_document_tokens=600",
    ]  # fmt: skip


def test_stats_print_and_draw_what_the_rows_hold(words, tmp_path, capsys):
    assert main(["data", "stats", *words]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "run" / "data" / "stats.json").read_text())
    assert (tmp_path / "run" / "data" / "stats.png").read_bytes().startswith(b"\x89PNG")
    assert (found["train"]["rows"], found["eval"]["rows"]) == (5, 2)
    assert set(found["train"]["mix"]) == {"ledger", "codebook"}
    assert sum(part["tokens"] for part in found["train"]["mix"].values()) == found["train"]["tokens"]
    assert sum(found["train"]["lengths"]["counts"]) == found["train"]["documents"]
    assert set(found["distances"]) == {"ledger", "codebook", "road_trips"}
    assert found["distances"]["ledger"]["max"] > 50
    for piece in ("train: 5 rows of 512 tokens", "packed", "mix (share of the tokens)", "<|im_start|>user"):
        assert piece in out


def test_stats_of_a_file_say_where_its_rows_went(words, tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    rows = [{"problem": f"Add {n} and 1.", "solution": f"{n} + 1 = {n + 1}."} for n in range(60)]
    file.write_text("\n".join(json.dumps(row) for row in [*rows, rows[0], {"problem": "?"}]) + "\n")
    asked = [*words, "data=jsonl", f"data.path={file}", "data.on_bad_row=skip", "data.eval_share=0.3"]
    assert main(["data", *asked, "data.train_rows=99", "data.eval_rows=99"]) == 0
    told = json.loads((tmp_path / "run" / "data" / "stats.json").read_text())["train"]["account"]
    assert told["read"] == 62 == told["kept"] + sum(told["dropped"].values())
    assert (told["dropped"]["duplicate"], told["dropped"]["bad_row_missing_field"]) == (1, 1)
    assert "source: 62 rows read" in capsys.readouterr().out


@pytest.mark.parametrize("procedural", [True, False])
def test_the_picture_has_no_empty_panel(tmp_path, monkeypatch, procedural):
    """Distances from facts to uses are known of problems made here; of a file, what became of its rows."""
    import matplotlib.figure

    drawn: dict[str, float] = {}

    def look(figure, *_, **__):
        for axis in figure.axes:
            marks = sum(len(line.get_xdata()) for line in axis.lines)
            drawn[axis.get_title()] = marks + sum(bar.get_width() for bar in axis.patches)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", look)
    part = {
        "lengths": stats.histogram([5, 400]),
        "mix": {"a": {"documents": 2, "tokens": 405}},
        "account": None if procedural else {"read": 9, "kept": 2, "not_needed": 3, "dropped": {"x": 4}},
    }
    distances = {"distances": {"ledger": stats.histogram([3, 900])}} if procedural else {}
    stats.write(tmp_path, {"train": part, **distances})
    last = "from a given fact to its uses, share" if procedural else "what became of 9 rows, train"
    assert list(drawn)[2] == last
    assert all(drawn.values())
    if not procedural:
        assert drawn[last] == 9


def test_prepare_says_what_became_of_the_rows_and_which_keys_decide(words, tmp_path, capsys):
    """`prepare` never evaluates: two evaluation rows are fine though eval.rows is 4."""
    rows = [{"problem": f"Add {n} and 1 to it, and then say so.", "solution": "1. " * 99} for n in range(60)]
    rows.append({"problem": "Another one.", "solution": "1 + 1 = 2. " * 900})
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    (tmp_path / "suite.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:2]) + "\n")
    asked = [*words, "data=jsonl", f"data.path={tmp_path}/a.jsonl", "data.eval_share=0.2", "data.eval_rows=2"]
    suites = [f"data.suites=[{tmp_path}/suite.jsonl]", "data.ngram=9"]
    assert main(["prepare", *asked, *suites, "data.decontaminate=report", "data.train_rows=null"]) == 0
    out = capsys.readouterr().out
    assert "train: 61 rows read, " in out
    assert "train: 1 longer than a row: cut to it (data.too_long)" in out
    assert re.search(r"train: [12] overlap with evaluation problems, listed in index.json: a.jsonl:", out)
    assert "were not needed: data.train_rows" not in out
    assert re.search(r"eval: \d+ more were not needed: data.eval_rows=2", out)
    assert main(["data", "stats", *asked, *suites, "data.train_rows=2"]) == 0
    out = capsys.readouterr().out
    assert "dropped: contaminated" in out
    assert "more were not needed: data.train_rows=2" in out
    assert main(["prepare", *words, "data.train_rows=null"]) == 2
    assert "data.train_rows=null: problems of data.source=procedural never end" in capsys.readouterr().err


def test_check_finds_what_sizes_do_not_show(words, tmp_path, capsys):
    assert main(["data", "check", *words]) == 0
    assert "train: 5 rows are whole" in capsys.readouterr().out
    file = next((tmp_path / "cache").glob("*/train/tokens-00000.npy"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(bytes(content))
    assert main(["data", "check", *words]) == 2
    assert "tokens-00000.npy does not have the content" in capsys.readouterr().err
    assert main(["data", "chekc", *words]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_the_tokenizer_alone_is_that_of_the_model(tmp_path):
    for source in ("tiny-llama", "tiny-qwen3"):
        config = ModelConfig(source=source, device="cpu")
        assert tokenizer_fingerprint(load_tokenizer(config)) == tokenizer_fingerprint(load_model(config)[1])
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    alone = load_tokenizer(ModelConfig(source="path", path=str(tmp_path / "model")))  # no weights there
    assert tokenizer_fingerprint(alone) == tokenizer_fingerprint(tokenizer)
    alone.chat_template = "{{ messages }}"
    assert tokenizer_fingerprint(alone) != tokenizer_fingerprint(tokenizer)
    with pytest.raises(UserError, match=r"tokenizer of .*absent.* cannot be loaded") as error:
        load_tokenizer(ModelConfig(source="path", path=str(tmp_path / "absent")))
    assert "\n" not in str(error.value)


FULL = """
import subprocess, sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from small_tokenizer import CHATML, build_tokenizer
from kvpop_lightning.config.schema import DataConfig
from kvpop_lightning.data import prepare as module
from kvpop_lightning.data.prepare import prepare
from kvpop_lightning.errors import UserError
disk, tokenizer = Path(sys.argv[1]), build_tokenizer(CHATML)
mount = ["mount", "-t", "tmpfs", "-o", f"size={sys.argv[2]}", "none", str(disk)]
assert subprocess.run(mount).returncode == 0
config = DataConfig(families=["ledger"], eval_families=["codebook"], row_length=2048, train_rows=64,
    min_document_tokens=200, max_document_tokens=900, cache_dir=str(disk / "cache"))
module.TOKENS_PER_SHARD = 16 * 2048
try:
    prepare(config, tokenizer, splits=("train",), progress=False)
except UserError as error:
    print(f"said: {error}")
left = [path.name for path in disk.rglob("*") if path.is_file() and path.stat().st_size]
print("left:", *sorted(left))
assert not [name for name in left if name.endswith(".tmp")] and "index.json" not in left
assert subprocess.run(["mount", "-o", "remount,size=32m", str(disk)]).returncode == 0
before = {p: p.stat().st_mtime_ns for p in disk.rglob("*.npy")}
done = prepare(config, tokenizer, splits=("train",), progress=False)
kept = [p for p in before if (done.folder / "train" / p.name).stat().st_mtime_ns == before[p]]
other = replace(config, cache_dir=str(disk / "again"))
a, b = done.folder / "train", prepare(other, tokenizer, splits=("train",), progress=False).folder / "train"
names = sorted(p.name for p in b.glob("*.npy"))
assert all((a / n).read_bytes() == (b / n).read_bytes() for n in names)
print("kept:", len(kept), "of", len(names))
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", ["300k", "700k"])
def test_a_disk_that_is_really_full_is_named_and_prepare_goes_on_later(tmp_path, size):
    """Four shards of 16 rows of 2048 tokens, about 230 kB each, on a disk of less."""
    disk = tmp_path / "disk"
    disk.mkdir()
    outside = ["unshare", "--mount", "--map-root-user"]
    try:
        able = subprocess.run([*outside, "mount", "-t", "tmpfs", "none", str(disk)], capture_output=True)
    except OSError:
        pytest.skip("no unshare here")
    if able.returncode:
        pytest.skip("a small disk cannot be mounted here")
    words = [sys.executable, "-c", FULL, str(disk), size, str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*outside, *words], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    said = next(line for line in done.stdout.splitlines() if line.startswith("said: "))
    assert "no space left while writing" in said
    assert "data.cache_dir" in said
    kept = int(done.stdout.split("kept: ")[1].split()[0])
    assert kept == {"300k": 3, "700k": 6}[size]
    assert not list(disk.iterdir())  # the disk was the process's own


def test_a_second_preparation_waits_for_the_first(config, tokenizer, tmp_path):
    """Two processes that want the same rows at once: one makes them, the other finds them."""
    asked = replace(config, train_rows=20)
    pipes = [os.pipe() for _ in range(2)]
    children = []
    for read, write in pipes:
        child = os.fork()
        if child == 0:
            prepared = prepare(asked, tokenizer, splits=("train",), progress=False)
            os.write(write, b"1" if prepared.reused else b"0")
            os._exit(0)
        os.close(write)
        children.append((child, read))
    told = [os.read(read, 1) for _, read in children]
    assert [os.waitpid(child, 0)[1] for child, _ in children] == [0, 0]
    assert sorted(told) == [b"0", b"1"]
