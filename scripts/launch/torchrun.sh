#!/usr/bin/env bash
# A run on several nodes, by torchrun: the same line on every node; the words after it are those of rlalign fit.
#
#   NODES=2 HEAD=node0 scripts/launch/torchrun.sh --config configs/base.yaml --config configs/grpo.yaml \
#       --config configs/strategies/fsdp2.yaml --config mine.yaml --run big
#
# NODES (1), GPUS of a node (all), HEAD: the node that the others find (localhost), PORT (29400), JOB: a name that the nodes
# of a run share (rlalign). A node that fails starts all anew, RESTARTS (3) times, from the newest checkpoint.
set -euo pipefail
exec torchrun \
    --nnodes="${NODES:-1}" \
    --nproc-per-node="${GPUS:-gpu}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="${HEAD:-localhost}:${PORT:-29400}" \
    --rdzv-id="${JOB:-rlalign}" \
    --max-restarts="${RESTARTS:-3}" \
    --module -- rlalign.cli fit --trainer.num_nodes="${NODES:-1}" --ckpt_path=auto "$@"
