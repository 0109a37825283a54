#!/bin/bash
# Train on the nodes of a Slurm job; torchrun.sh lies beside this file:
#
#   sbatch slurm.sh synthetic:criteo-kaggle --batch 16384 --shards 4
#
#SBATCH --job-name=skirl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
# A node that fails does not end the job, which goes on with the others; a job that is ended is queued again, and resumes.
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
set -eu
HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HOST SAVE="${SAVE:-$SLURM_SUBMIT_DIR/skirl-$SLURM_JOB_ID}"
export NODES="1:$SLURM_JOB_NUM_NODES" JOB="$SLURM_JOB_ID" PORT=$((20000 + SLURM_JOB_ID % 20000))
exec srun --no-kill --kill-on-bad-exit=0 bash "$SLURM_SUBMIT_DIR/torchrun.sh" "$@"
