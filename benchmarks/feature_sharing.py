"""What sharing a frozen base's features saves: a trial from nothing against one that finds them cached.

    python benchmarks/feature_sharing.py --trials 50 --out docs/feature_sharing.json [key=value ...]

Both trials are what `kvpop sweep` runs: training and measurement in a process of its own, with another
decay. The time of `--trials` trials is extrapolated: all from nothing, against the first from nothing and
the others with what it left. `training` counts the training alone, `trial` also loading and measuring,
which nothing shares.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from kvpop_lightning.sweeps.objective import Objective
from kvpop_lightning.sweeps.trial import FINISHED, run_trial
from kvpop_lightning.training.feature_store import folder_bytes

WORDS = ("experiment=demo", "policy=kvpop_mlp", "tracking.enabled=false")
DECAYS = {"from_nothing": 0.74, "shared": 0.8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--rows", type=int, default=2, help="held-out rows of the measurement")
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--out", type=Path)
    parser.add_argument("words", nargs="*", help="settings, as for kvpop train")
    arguments = parser.parse_args()
    objective = Objective(arguments.budget, arguments.rows, ("kl", "seconds"))
    words = [*WORDS, *arguments.words]
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "features"
        # A first short trial loads weights and data into the disk cache, so that both others find them alike.
        found = {}
        for name, decay in (("warm_up", 0.9), *DECAYS.items()):
            own = cache if name != "warm_up" else Path(folder) / "thrown_away"
            more = ["trainer.max_steps=1"] if name == "warm_up" else []
            result = run_trial(
                [*words, *more, f"policy.decay={decay}", f"trainer.feature_cache_dir={own}"],
                {},
                run_dir=Path(folder) / name,
                objective=objective,
                threads=len(os.sched_getaffinity(0)),
            )
            if result.state != FINISHED:
                raise SystemExit(f"{name}: {result.state}: {result.message}\n{result.last_lines}")
            found[name] = {"trial": result.seconds, "training": result.values["seconds"]}
            print(name, {key: round(value, 1) for key, value in found[name].items()}, flush=True)
        held = folder_bytes(cache)
    cold, warm = found["from_nothing"], found["shared"]
    count = arguments.trials
    text = {
        "words": words,
        "cores": len(os.sched_getaffinity(0)),
        "eval_rows": arguments.rows,
        "cache_megabytes": round(held / 1e6, 1),
        "seconds": {name: {k: round(v, 1) for k, v in entry.items()} for name, entry in found.items()},
        f"extrapolated_to_{count}": {
            part: {
                "separate_s": round(count * cold[part]),
                "shared_s": round(cold[part] + (count - 1) * warm[part]),
                "factor": round(count * cold[part] / (cold[part] + (count - 1) * warm[part]), 2),
            }
            for part in ("training", "trial")
        },
    }
    print(json.dumps(text, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
