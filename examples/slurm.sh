#!/usr/bin/env bash
# One run on two nodes of a SLURM cluster, under FSDP2, started again where a process dies, and resumed where the job is.
#
#   sbatch examples/slurm.sh train gigaword --terms r3f engine.name=fsdp2 output=/shared/runs/gigaword-r3f
#
# Its arguments are a command of seqreg; the output folder has to be seen by all nodes under one path. SLURM sends SIGTERM
# two minutes before the time is over (--signal): the run saves, and the same line resumes it.
#SBATCH --job-name=seqreg
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
set -euo pipefail
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
srun seqreg launch --nnodes "$SLURM_NNODES" --nproc "${NPROC:-8}" --rdzv-endpoint "${hosts%%$'\n'*}:${PORT:-29500}" \
    --max-restarts "${MAX_RESTARTS:-3}" --shutdown-timeout 100 "$@"
