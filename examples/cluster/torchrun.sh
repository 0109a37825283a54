#!/usr/bin/env bash
# Train on several machines. Run this on each of them, with the same words:
#
#   HOST=first SAVE=/shared/run bash torchrun.sh synthetic:criteo-kaggle --batch 16384 --shards 4
#
# HOST is a machine that the others can reach, where launchers meet; SAVE is a folder that all of them see.
# Machines may come and go: the run goes on from its last checkpoint with those that are there, and the bits stay the same.
set -u
: "${HOST:?set HOST to the machine where launchers meet, the same on all}"
: "${SAVE:?set SAVE to a folder that all machines see}"
trap 'exit 130' INT TERM

# A group that is started again must not read the addresses of the one before it; bits belong to a number of threads.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# The loop is for a launcher that is killed, and for the one where all others meet.
while ! ${TORCHRUN:-torchrun} \
    --nnodes="${NODES:-1:4}" --nproc-per-node="${TRAINERS:-1}" --max-restarts=100 \
    --rdzv-backend=c10d --rdzv-endpoint="$HOST:${PORT:-29400}" --rdzv-id="${JOB:-skirl}" \
    --rdzv-conf="join_timeout=${JOIN:-600},last_call_timeout=5,keep_alive_interval=5,keep_alive_max_attempt=8" \
    -m -- skirl train --save "$SAVE" --resume --save-every "${EVERY:-1000}" --peer-timeout "${TIMEOUT:-120}" "$@"
do sleep 2; done
