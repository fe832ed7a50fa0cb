"""A registered policy loads in another process and computes what the original does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kvpop_lightning import Budget, retrofit
from kvpop_lightning.errors import UserError
from kvpop_lightning.models.tiny import tiny_model
from kvpop_lightning.tracking.registry import load_registered, register_policy
from kvpop_lightning.tracking.store import Store

TOKENS = torch.arange(40).view(2, 20) * 7 % 250
LOAD = """
import sys
import mlflow, numpy, torch
from kvpop_lightning.models.tiny import tiny_model
from kvpop_lightning.tracking.registry import load_registered
uri, model, base, out = sys.argv[1:]
tokens = torch.arange(40).view(2, 20) * 7 % 250
with torch.inference_mode():
    ours = load_registered(model, base=tiny_model(), uri=uri)(tokens, use_cache=False).logits
mlflow.set_tracking_uri(uri)
mlflow.set_registry_uri(uri)
plain = mlflow.pyfunc.load_model(model, model_config={"base": base})
assert plain.metadata.signature.inputs.input_names() == ["input_ids"], plain.metadata.signature
numpy.savez(out, ours=ours.numpy(), plain=plain.predict({"input_ids": tokens.numpy()}))
"""


def test_a_fresh_process_gives_the_same_logits(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    store = Store(uri, "test")
    run_id = store.call("run", lambda client: client.create_run(store.experiment_id)).info.run_id
    tiny_model().save_pretrained(tmp_path / "base")
    model = retrofit(tiny_model(), budget=Budget(2, 4, 4), scorer="mlp", seed=3)
    model.save_pretrained(tmp_path / "policy", base_weights=False)
    first = register_policy(run_id, tmp_path / "policy", "evictor", uri=uri)
    again = register_policy(run_id, tmp_path / "policy", "evictor", uri=uri)
    assert (first.uri, first.reused, again.uri, again.reused) == (
        "models:/evictor/1",
        False,
        "models:/evictor/1",
        True,
    )
    other = retrofit(tiny_model(), budget=Budget(2, 4, 4), scorer="mlp", seed=4)
    other.save_pretrained(tmp_path / "other", base_weights=False)
    assert register_policy(run_id, tmp_path / "other", "evictor", uri=uri).version == "2"
    (weights,) = (tmp_path / "mlruns").rglob("registered/policy/artifacts/policy/kvpop.safetensors")
    assert not (weights.parent / "model.safetensors").exists()  # the base stays where it is
    out = tmp_path / "logits.npz"
    words = [uri, first.uri, str(tmp_path / "base"), str(out)]
    done = subprocess.run([sys.executable, "-c", LOAD, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.inference_mode():
        wanted = model(TOKENS, use_cache=False).logits.numpy()
        assert not np.allclose(wanted, other(TOKENS, use_cache=False).logits.numpy())
    with np.load(out) as found:
        assert np.array_equal(found["ours"], wanted)
        assert np.array_equal(found["plain"], wanted)


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    with pytest.raises(UserError, match="holds no trained policy"):
        register_policy("0" * 32, tmp_path, "x", uri=uri)
    for wrong in ("mine/1", "models:/", "models:/a/b/c"):
        with pytest.raises(UserError, match="models:/NAME/VERSION"):
            load_registered(wrong, uri=uri)
    with pytest.raises(UserError, match="no registered model"):
        load_registered("models:/nothing", uri=uri)
    with pytest.raises(UserError, match="cannot load models:/nothing/1"):
        load_registered("models:/nothing/1", uri=uri)
