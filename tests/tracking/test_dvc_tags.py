"""DVC's hashes become tags, from hand-written files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpop_lightning.config import Config, compose
from kvpop_lightning.tracking.dvc import dvc_tags

LOCK = """
schema: '2.0'
stages:
  prepare:
    cmd: kvpop prepare
    params:
      params.yaml:
        seed: 0
    outs:
    - path: .cache/data
      hash: md5
      md5: aaaa.dir
      size: 5
  train:
    cmd: kvpop train
    deps:
    - path: .cache/data
      hash: md5
      md5: older.dir
    outs:
    - path: runs/x/policy
      md5: bbbb.dir
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)
    return compose(["run_dir=runs/x"])


def test_nothing_without_dvc(config: Config) -> None:
    assert dvc_tags(config) == {}
    Path("dvc.lock").write_text("{ broken")
    assert dvc_tags(config) == {}


def test_a_lock_names_data_policy_and_parameters(config: Config) -> None:
    Path("dvc.lock").write_text(LOCK)
    Path(".cache/data/a").mkdir(parents=True)
    Path(".cache/data/a/b").write_text("12345")
    tags = dvc_tags(config)
    assert (tags["dvc.data"], tags["dvc.policy"]) == ("aaaa.dir", "bbbb.dir")
    assert "dvc.changed" not in tags
    Path("dvc.lock").write_text(LOCK.replace("seed: 0", "seed: 1"))
    other = dvc_tags(config)
    assert other["dvc.params"] != tags["dvc.params"]
    assert other["dvc.lock"] != tags["dvc.lock"]
    Path(".cache/data/a/b").write_text("123456")
    assert dvc_tags(config)["dvc.changed"] == "data"


def test_an_added_file_has_its_own(config: Config) -> None:
    Path("rows.jsonl").write_text("{}")
    Path("rows.jsonl.dvc").write_text("outs:\n- md5: cccc\n  size: 2\n  path: rows.jsonl\n")
    assert dvc_tags(compose(["data=jsonl", "data.path=rows.jsonl"])) == {"dvc.data": "cccc"}
