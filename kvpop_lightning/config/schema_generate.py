"""Settings of generation, chat, export and of the decoding benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class GenerateConfig:
    prompt: str | None = None
    """The text to answer; `-` = read standard input."""
    system: str | None = None
    """System message before it."""
    max_new_tokens: int = 256
    """Tokens to generate at most."""
    temperature: float = 0.0
    """0 = greedy."""
    top_k: int = 0
    """Only the k most likely tokens; 0 = all."""
    top_p: float = 1.0
    """Share of the probability mass to sample from."""
    min_p: float = 0.0
    """Only tokens at least so many times as likely as the likeliest."""
    samples: int = 1
    """Continuations of the prompt, which is read once; sample j draws from (`seed`, j)."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a continuation and are not part of it."""
    ignore_eos: bool = False
    """Go on behind the model's end token."""
    beyond_positions: bool = False
    """Read and generate past the positions the model was trained for."""
    slots: int = 4
    """Continuations at a time, at most."""
    backend: str = "auto"
    """`graph` (fused step in a CUDA graph), `plain` (the library's modules), `auto` = graph where it
    serves."""
    chunk: int = 256
    """Prompt tokens per prefill chunk."""
    chat_template: bool = True
    """Wrap the prompt as a chat message when the tokenizer knows how."""


@dataclass(frozen=True)
class ExportConfig:
    path: str | None = None
    """Folder to write; None = `run_dir/export/<policy>`."""
    base_weights: bool = True
    """Write the base's weights too; False = only if they changed, else the base is named by its origin."""
    table: str | None = None
    """`table.json` whose figures the model card takes; None = `run_dir/table.json` when there is one."""


@dataclass(frozen=True)
class BenchConfig:
    shapes: str = "auto"
    """`qwen3-4b` or `tiny` (random weights of those shapes), `configured` (`model.*`), `auto` = by device."""
    contestants: list[str] = field(
        default_factory=lambda: ["full", "library", "streaming_llm", "dms", "kvpop_mlp", "kvpop_mlstm"]
    )
    """What is measured: policies; `full`, the full cache through the fastest path there is; `library`, the
    library's own growing cache; `static`, its static cache under torch.compile."""
    inputs: str = "kv"
    """What the scorers measured read: `kv` (key and value) or `kv_hidden` (the hidden state too)."""
    budget: int | None = None
    """Keys per KV head; None = 4096 on a GPU, 64 elsewhere."""
    lengths: list[int] = field(default_factory=list)
    """Generated lengths at which steps are timed; empty = by device."""
    batches: list[int] = field(default_factory=list)
    """Rows decoded side by side; empty = by device."""
    steps: int | None = None
    """Timed steps of each cell; None = by device."""
    warmup: int = 5
    """Steps before them, not timed."""
    reduction: float = 4.0
    """DMS: the factor by which its gates shrink the cache."""
    prompt: int = 0
    """Also read a prompt of so many tokens in chunks and note the peak memory; 0 = none."""
    chunk: int = 2048
    """Tokens of it that a forward call reads."""
