"""What `mlflow.pyfunc.load_model` makes of a registered policy: token ids in, next-token logits out."""

from __future__ import annotations

from typing import Any

import mlflow.models
import mlflow.pyfunc
import numpy as np
from mlflow.models import ModelSignature
from mlflow.types import Schema, TensorSpec


class PolicyModel(mlflow.pyfunc.PythonModel):  # type: ignore[name-defined]
    """The retrofitted model under its eviction policy.

    `model_config={"base": NAME_OR_FOLDER}` of `mlflow.pyfunc.load_model` gives the base model; without it the
    policy's own note of its base is followed.
    """

    def load_context(self, context: Any) -> None:
        from kvpop_lightning.models.persist import load

        self.model = load(context.artifacts["policy"], (context.model_config or {}).get("base"))

    # No hints: MLflow would take them for a schema, and the signature is given.
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """Logits float32 [B, T, vocabulary] of token ids int64 [B, T], one document per row, no padding."""
        import torch

        ids = model_input["input_ids"] if isinstance(model_input, dict) else model_input
        tokens = torch.as_tensor(np.asarray(ids), dtype=torch.int64)
        with torch.inference_mode():
            device = next(self.model.parameters()).device
            return self.model(tokens.to(device), use_cache=False).logits.float().cpu().numpy()


def signature() -> ModelSignature:
    """Token ids int64 [B, T] to logits float32 [B, T, V]."""
    return ModelSignature(
        inputs=Schema([TensorSpec(np.dtype("int64"), (-1, -1), "input_ids")]),
        outputs=Schema([TensorSpec(np.dtype("float32"), (-1, -1, -1), "logits")]),
    )


mlflow.models.set_model(PolicyModel())  # MLflow runs this file again when it loads the model
