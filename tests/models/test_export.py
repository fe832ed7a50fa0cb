"""`kvpop export`: it loads as base and as retrofitted model; its card claims nothing unmeasured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpop_lightning
from kvpop_lightning.cli import main
from kvpop_lightning.errors import UserError

TINY = ["model=tiny_llama", "policy=kvpop_linear", "policy.budget.sink=2", "policy.budget.window=6"]
TINY += ["policy.budget.topk=8"]
X = torch.arange(3, 43)[None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["export", "out", *TINY]) == 0
    return tmp_path / "out"


def logits(model: Any) -> torch.Tensor:
    return model(X.to(model.device), use_cache=False).logits.detach().cpu()


def test_it_loads_as_base_and_as_retrofitted_model(folder: Path) -> None:
    model = kvpop_lightning.load(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert model.kvpop.budget.total == 16
    with kvpop_lightning.dense(model):
        assert torch.equal(logits(model), logits(plain))
    assert not torch.equal(logits(model), logits(plain))
    stored = json.loads((folder / "config.json").read_text())["kvpop"]
    assert stored == {"format": 1, "policy": model.kvpop.to_dict()}
    assert {file.suffix for file in folder.iterdir()} <= {".json", ".safetensors", ".md", ".jinja"}
    assert AutoTokenizer.from_pretrained(folder)("ab")["input_ids"]
    # another policy on the exported base: the folder it came from says nothing about that one
    other = kvpop_lightning.retrofit(plain, kvpop_lightning.Budget(1, 4, 5), policy="random")
    with torch.no_grad():
        other.model.embed_tokens.weight.mul_(1.01)
    other.save_pretrained(folder.parent / "other")
    assert kvpop_lightning.load(folder.parent / "other").kvpop.budget.total == 10
    # over the same folder again, and without the base's weights
    assert main(["export", "path=out", *TINY]) == 0
    assert main(["export", "small", *TINY, "base_weights=false"]) == 0
    assert not (folder.parent / "small" / "model.safetensors").exists()
    # the base that was only named comes back where `model.device=auto` puts it
    assert torch.allclose(logits(kvpop_lightning.load(folder.parent / "small")), logits(model), atol=1e-4)


def test_the_card_takes_its_figures_from_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Not measured" in (folder / "README.md").read_text()
    rows = [{"row": 0}, {"row": 1}]
    table = [
        dict(zip(("policy", "budget", "kl", "top1", "perplexity"), row, strict=True)) | {"rows": rows}
        for row in (
            ("full", 128, 0.0, 1.0, 2.5),
            ("kvpop_linear", 16, 0.1234, 0.875, 3.25),
            ("kvpop_linear", 12, None, None, None),
            ("kvpop_mlp", 16, 0.0777, 0.9, 3.0),
        )
    ]
    (folder.parent / "table.json").write_text(json.dumps(table))
    assert main(["export", "out", *TINY, "table=table.json"]) == 0
    card = (folder / "README.md").read_text()
    assert "| 16 | 0.1234 | 87.5% | 3.250 |" in card
    assert "| all (dense) | 0 | 100.0% | 2.500 |" in card
    assert "2 held-out rows" in card
    assert "0.0777" not in card
    assert "Not measured" not in card
    (folder.parent / "table.json").write_text(json.dumps(table[2:]))
    assert main(["export", "out", *TINY, "table=table.json"]) == 0
    assert "Not measured" in (folder / "README.md").read_text()
    (folder.parent / "table.json").write_text('{"policy": "x"}')
    capsys.readouterr()
    assert main(["export", "out", *TINY, "table=table.json"]) == 2
    assert "table.json" in capsys.readouterr().err.splitlines()[-1]


def test_a_run_folder_gives_policy_and_table(folder: Path) -> None:
    """The trained policy of run_dir is what is exported."""
    model = kvpop_lightning.load(folder)
    with torch.no_grad():
        for parameter in model.kvpop.parameters():
            parameter.add_(1.0)
    model.save_pretrained(folder.parent / "run" / "policy" / "kvpop_linear")
    assert main(["export", *TINY, "run_dir=run"]) == 0
    exported = kvpop_lightning.load(folder.parent / "run" / "export" / "kvpop_linear")
    wanted = model.kvpop.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in exported.kvpop.state_dict().items())
    assert main(["export", *TINY, "policy=full"]) == 2


def test_an_exported_folder_is_a_model_with_its_policy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`generate` and `export` find the policy in the folder that `model.path` names."""
    model = kvpop_lightning.load(folder)
    with torch.no_grad():
        for parameter in model.kvpop.parameters():
            parameter.add_(1.0)
    model.save_pretrained(folder.parent / "run" / "policy" / "kvpop_linear")
    assert main(["export", "theirs", *TINY, "run_dir=run"]) == 0
    at = ["model.source=path", "model.path=theirs"]
    capsys.readouterr()
    assert main(["export", "again", *TINY[1:], *at]) == 0
    assert "warning" not in capsys.readouterr().err
    again = kvpop_lightning.load(folder.parent / "again").kvpop.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.kvpop.state_dict().items())
    words = ["hello", "max_new_tokens=2", *at]
    assert main(["generate", *words, "policy=kvpop_linear", "policy.budget.topk=30"]) == 0
    assert "keeps its own budget, sink=2 window=6 topk=8" in capsys.readouterr().err
    assert main(["generate", *words, "policy=kvpop_mlp"]) == 0
    assert "theirs comes with kvpop_linear: policy=kvpop_linear uses it" in capsys.readouterr().err


def test_a_base_that_was_trained_with_its_policy_comes_with_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = kvpop_lightning.load(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    saved = folder.parent / "run" / "policy" / "kvpop_linear"
    model.save_pretrained(saved)
    assert (saved / "model.safetensors").exists()
    capsys.readouterr()
    assert main(["generate", "hello", *TINY, "run_dir=run", "max_new_tokens=2"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main(["export", "theirs", *TINY, "run_dir=run"]) == 0
    assert torch.equal(logits(kvpop_lightning.load(folder.parent / "theirs")), logits(model))


def test_folders_that_do_not_fit_are_one_line(folder: Path) -> None:
    def refused(*words: str) -> None:
        with pytest.raises(UserError) as error:
            kvpop_lightning.load(folder)
        assert "\n" not in str(error.value)
        for word in words:
            assert word in str(error.value), str(error.value)

    description, config = folder / "kvpop.json", folder / "config.json"
    good, good_config = description.read_text(), config.read_text()
    description.write_text(json.dumps(json.loads(good) | {"format": 9}))
    refused("format version 9", "reads 1")
    description.write_text(good)
    changed = json.loads(good_config)
    changed["kvpop"]["policy"]["budget"]["topk"] = 99
    config.write_text(json.dumps(changed))
    refused("config.json", "kvpop.json")
    config.write_text(json.dumps(json.loads(good_config) | {"intermediate_size": 32}))
    refused("other shapes", str(folder))
    config.write_text(good_config)
    weights = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in weights.items() if "layers.1" not in n}, folder / "model.safetensors")
    refused(str(folder))
    with pytest.raises(
        UserError, match="was made for: pass the right base="
    ):  # the folder has no name for it
        kvpop_lightning.load(folder, base=kvpop_lightning.models.tiny_model("llama", seed=9))
