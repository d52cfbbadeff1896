#!/bin/bash
# Trains on 4 nodes of 8 GPUs, one process a GPU, as JAX expects of SLURM:
#
#   sbatch experiments/cluster/slurm.sh --model dense_1p5b --policies ufp4 --alone \
#       --data tokens --mesh fsdp=32 --out runs/dense_1p5b
#
# Before its time is over SLURM sends SIGTERM; the state is then saved, the command ends
# with status 75, and the job queues again and goes on.
#SBATCH --job-name=fp4jax
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

srun --kill-on-bad-exit=1 python -m experiments.pretrain \
    --distributed --resume=auto "$@"
status=$?
[ "$status" -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$status"
