"""The range of every numeric setting."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    hint: str = ""

    def text(self) -> str:
        if self.high == math.inf:
            return f"{'greater than' if self.low_open else 'at least'} {self.low:.12g}"
        return f"in {'(' if self.low_open else '['}{self.low:.12g}, {self.high:.12g}]"

    def holds(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        return above and value <= self.high


_POSITIVE = Bounds(0, low_open=True)
_COUNT = Bounds(1)
_NATURAL = Bounds(0)
_SHARE = Bounds(0, 1, low_open=True)

BOUNDS: dict[str, Bounds] = {
    "data.row_length": Bounds(2, 2**24, hint="a row needs a token and its successor"),
    "data.train_rows": _COUNT,
    "data.eval_rows": _COUNT,
    "data.min_document_tokens": _COUNT,
    "data.max_document_tokens": _COUNT,
    "data.seed": _NATURAL,
    "data.workers": _NATURAL,
    "data.eval_share": Bounds(0, 1, hint="0 = no evaluation rows from the file"),
    "data.max_tokens": _COUNT,
    "data.ngram": Bounds(2, hint="words in a row"),
    "data.processes": Bounds(1, 1024, hint="each loads the tokenizer"),
    "data.window": _COUNT,
    "policy.budget.sink": Bounds(0, hint="0 = no sinks"),
    "policy.budget.window": Bounds(1, hint="a query must at least see itself"),
    "policy.budget.topk": Bounds(
        1, hint="policy=streaming_llm keeps only sinks and recent tokens and splits the same total"
    ),
    "data.traces.problems": _COUNT,
    "data.traces.samples": _COUNT,
    "data.traces.temperature": Bounds(0, hint="0 = greedy"),
    "data.traces.top_p": _SHARE,
    "data.traces.max_new_tokens": _COUNT,
    "data.traces.slots": _COUNT,
    "policy.scorer.width": _COUNT,
    "policy.scorer.memory_dim": _COUNT,
    "policy.scorer.value_dim": _COUNT,
    "policy.scorer.delay": _NATURAL,
    "policy.decay": Bounds(0, 1, low_open=True, hint="1 = no recency bias"),
    "policy.decay_depth": Bounds(-4, 4, hint="0 = the same decay in all layers"),
    "policy.decay_heads": Bounds(-4, 4, hint="0 = the same decay for all heads of a layer"),
    "policy.decay_step": _COUNT,
    "distill.temperature": _POSITIVE,
    "distill.margin_scale": _POSITIVE,
    "distill.query_fraction": _SHARE,
    "distill.regression_weight": _NATURAL,
    "distill.retention_weight": _NATURAL,
    "distill.kl_topk": Bounds(0, hint="0 = all logits"),
    "distill.kl_chunk": _COUNT,
    "distill.gate.reduction": Bounds(1, hint="1 = nothing is closed"),
    "distill.gate.ramp": _POSITIVE,
    "distill.gate.weight": _NATURAL,
    "distill.gate.lr": _POSITIVE,
    "policy.gate.width": Bounds(0, hint="0 = a linear map"),
    "trainer.max_steps": _COUNT,
    "trainer.rows_per_step": _COUNT,
    "trainer.accumulate": _COUNT,
    "trainer.scorer_lr": _POSITIVE,
    "trainer.scorer_lr_final": Bounds(0, 1),
    "trainer.base_lr": _NATURAL,
    "trainer.warmup_steps": _NATURAL,
    "trainer.weight_decay": _NATURAL,
    "trainer.gradient_clip": Bounds(0, hint="0 = no clipping"),
    "trainer.devices": _COUNT,
    "trainer.checkpoint_every": _COUNT,
    "trainer.log_every": _COUNT,
    "trainer.feature_cache_limit_gb": _NATURAL,
    "eval.reference_length": _COUNT,
    "eval.rows": _COUNT,
    "eval.first_position": Bounds(0, 1),
    "eval.kl_chunk": _COUNT,
    "eval.position_stride": _COUNT,
    "tracking.port": Bounds(1, 65535),
    "tracking.retry_s": _NATURAL,
    "tracking.final_wait_s": _NATURAL,
    "tracking.peak_tflops": _POSITIVE,
    "generate.max_new_tokens": _COUNT,
    "generate.temperature": Bounds(0, hint="0 = greedy"),
    "generate.top_k": Bounds(0, hint="0 = all"),
    "generate.top_p": _SHARE,
    "generate.min_p": Bounds(0, 1),
    "generate.samples": _COUNT,
    "generate.slots": _COUNT,
    "generate.chunk": _COUNT,
    "bench.budget": Bounds(9, hint="4 sinks, a window and the rest"),
    "bench.steps": _COUNT,
    "bench.warmup": _NATURAL,
    "bench.reduction": Bounds(1, hint="1 = nothing is closed"),
    "bench.prompt": Bounds(0, hint="0 = none"),
    "bench.chunk": _COUNT,
    "sweep.workers": Bounds(0, hint="0 = only make the study"),
    "sweep.trials": _COUNT,
    "sweep.time_limit_s": _POSITIVE,
    "sweep.retries": Bounds(0, hint="0 = never again"),
    "sweep.heartbeat_s": Bounds(1, hint="seconds"),
    "sweep.grace_s": _NATURAL,
    "sweep.trial_timeout_s": _POSITIVE,
    "sweep.memory_limit_gb": _POSITIVE,
    "sweep.threads": _COUNT,
    "ablate.workers": _COUNT,
    "ablate.retries": Bounds(0, hint="0 = never again"),
    "ablate.grace_s": _NATURAL,
    "ablate.point_timeout_s": _POSITIVE,
    "ablate.memory_limit_gb": _POSITIVE,
    "ablate.threads": _COUNT,
    "seed": _NATURAL,
}
