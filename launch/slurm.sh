#!/bin/bash
# Slurm: sbatch launch/slurm.sh laptop --mesh data=8
#
# Not run on a cluster yet: linted, and started by a test with a stand-in for srun.
#
# One task on each node; a task has all of its node's accelerators. Submit from the repository's
# folder, which all nodes have to see. srun tells each task who it is, and train.py reads that: no
# address is written here. A run is named after its job unless --run names it. A job that is
# requeued keeps its number, so its run goes on. A job whose time is over saves and ends, and Slurm
# does not requeue it: a new job goes on with the same run by --run job-1234, or by the name that
# both were given.

#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --requeue
# Two minutes before the time is over every task is sent SIGTERM, and the run saves.
#SBATCH --signal=TERM@120

set -euo pipefail

named=no
for word in "$@"; do
  case $word in --run | --run=*) named=yes ;; esac
done
# Of two --run the last would win, and the preset has to stay in front of all options.
if [[ $named == no ]]; then
  set -- "$@" --run "job-$SLURM_JOB_ID"
fi

# If one task dies the others wait for it in a collective: they are ended, too.
srun --kill-on-bad-exit=1 "${PYTHON:-.venv/bin/python}" train.py "$@"
