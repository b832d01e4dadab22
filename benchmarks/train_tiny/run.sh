#!/bin/bash
# usage: run.sh DATA STATE MINUTES TOTAL_MINUTES [RESUME]    trains on all GPUs of this host; the folder STATE gets the state
# GPUS=N takes fewer (CUDA_VISIBLE_DEVICES says which); with PORT two runs fit on one host.
# Compiled attention first; if that fails, compiled elementwise functions; else plain PyTorch, from the last state saved.
set -u
data=$1 state=$2 minutes=$3 total=$4 resume=${5:-}
here=$(cd "$(dirname "$0")/.." && pwd)
gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
cores=$(nproc)
workers=$((cores / gpus - 2)); [ $workers -gt 8 ] && workers=8; [ $workers -lt 1 ] && workers=1
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
begin=$(date +%s)
for mode in ${MODES:-all leaf off}; do
    left=$(python3 -c "import time; print(round($minutes - (time.time() - $begin) / 60, 2))")
    python3 -c "exit($left < 0.5)" || break
    echo "== $mode, $left minutes, $gpus GPUs, $workers workers each"
    PYTHONPATH=$here OMP_NUM_THREADS=1 python3 -m torch.distributed.run --nnodes 1 --master-addr 127.0.0.1 \
        --master-port "${PORT:-29511}" --nproc-per-node "$gpus" -m "${PROGRAM:-train_tiny.train}" \
        --data "$data" --state "$state" --minutes "$left" --total-minutes "$total" --workers "$workers" --compile "$mode" \
        ${resume:+--resume "$resume"} ${TRAIN_ARGS:-} 2>&1 && break
done
ls -la "$state"
