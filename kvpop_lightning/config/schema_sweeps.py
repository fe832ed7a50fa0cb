"""The settings of `kvpop sweep` and `kvpop ablate`, in the form of `schema.py`, which holds all others."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SweepConfig:
    name: str | None = None
    """The sweep: `sweeps/NAME.yaml`, or a path that ends in .yaml. `kvpop sweep NAME` sets it."""
    worker: bool = False
    """Join the study that another `kvpop sweep NAME` made in the same storage (`--worker`)."""
    report: bool = False
    """Run no trial, only write the report of what the study holds (`--report`)."""
    workers: int = 1
    """Trials at the same time on this machine; 0 = make the study and leave."""
    storage: str | None = None
    """null = sqlite in the run folder, `journal` = a journal file there, a path (.db or .log), or a
    `postgresql://` or `mysql://` address for workers on many machines."""
    study: str | None = None
    """Name of the study in its storage; null = the name of the sweep."""
    trials: int | None = None
    """Total number of trials instead of the sweep file's."""
    time_limit_s: float | None = None
    """Seconds after which no trial starts and running ones are stopped, instead of the sweep file's."""
    gpus: list[str] = field(default_factory=lambda: ["auto"])
    """GPUs that trials take turns on: `auto` = all that are visible, `none`, or device numbers."""
    retries: int = 2
    """How often a trial that died (crash, lost worker) is run again."""
    heartbeat_s: float = 15.0
    """Seconds between two signs of life of a running trial; after four without one it counts as lost."""
    grace_s: float = 60.0
    """Seconds that a trial gets to write its checkpoint when it is asked to stop, before SIGTERM."""
    trial_timeout_s: float | None = None
    """Longest time of one trial; a longer one is stopped and fails."""
    memory_limit_gb: float | None = None
    """Memory a trial may allocate on the CPU; one that wants more ends as out of memory, alone."""
    threads: int | None = None
    """CPU threads of one trial; null = this machine's, shared among the workers."""


@dataclass(frozen=True)
class AblateConfig:
    name: str | None = None
    """The grid: `sweeps/ablation_NAME.yaml`, or a path that ends in .yaml. `kvpop ablate NAME` sets it."""
    only: str | None = None
    """Cells to run, by their levels: `scorer=linear,mlp`, several axes with a space between (`--only`)."""
    show: bool = False
    """Show the cells and what is known of them, run nothing (`--list`)."""
    workers: int = 1
    """Points at the same time; 1 on a GPU, so that every point finds the features of the one before."""
    gpus: list[str] = field(default_factory=lambda: ["auto"])
    """GPUs that points take turns on: `auto` = all that are visible, `none`, or device numbers."""
    retries: int = 1
    """How often a point that died (a crash, not a wrong setting) is run again."""
    grace_s: float = 60.0
    """Seconds that a point gets to write its checkpoint when it is asked to stop, before SIGTERM."""
    point_timeout_s: float | None = None
    """Longest time of one point; a longer one is stopped and fails."""
    memory_limit_gb: float | None = None
    """Memory a point may allocate on the CPU."""
    threads: int | None = None
    """CPU threads of one point; null = this machine's, shared among the workers."""
