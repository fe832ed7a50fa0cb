#!/bin/bash
# A sweep as a SLURM job array: every task is a worker of one study in a PostgreSQL or MySQL database.
#
#   export KVPOP_STORAGE=postgresql://user@host/database      # reachable from the compute nodes
#   sbatch --array=0-7 scripts/slurm_sweep.sh budget_decay_temperature trainer.max_steps=200
#
# The first task makes the study and, when its own trials are done and no other waits, concludes the sweep:
# best points and baseline measured again, NAME_best.yaml written. A task that is preempted gives its trial
# back (SIGTERM) or is noticed by its silence (a node that died); the trial goes on from its checkpoint in a
# folder that all tasks share. Submit the same line again to go on to the total.
#SBATCH --job-name=kvpop-sweep
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=kvpop-sweep-%A_%a.log
set -euo pipefail

name=${1:?usage: sbatch --array=0-N scripts/slurm_sweep.sh NAME [key=value ...]}
shift
: "${KVPOP_STORAGE:?set KVPOP_STORAGE to the address of the database}"
python=${KVPOP_PYTHON:-python}

common=("storage=$KVPOP_STORAGE" "run_dir=${KVPOP_RUN_DIR:-runs/sweeps/$name}" "sweep.gpus=auto" "$@")
# exec: SLURM's signal must reach the sweep, not this shell.
if [[ ${SLURM_ARRAY_TASK_ID:-0} == "${SLURM_ARRAY_TASK_MIN:-0}" ]]; then
    exec "$python" -m kvpop_lightning.cli sweep "$name" "${common[@]}"
fi
exec "$python" -m kvpop_lightning.cli sweep "$name" --worker "${common[@]}"
