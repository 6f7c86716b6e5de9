#!/bin/bash
#SBATCH --cpus-per-task=1
#SBATCH --error=/scratch/ada/runs/gpu_types/logs/sft/%j_0_log.err
#SBATCH --job-name=sft-0
#SBATCH --mem=16000M
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/gpu_types/logs/sft/%j_0_log.out
#SBATCH --partition=cpu
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=600

export GOMP_SPINCOUNT=0
export OMP_NUM_THREADS=1
export OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH=/home/ada/rlinf
export RLINF_STOP_MARGIN_S=90
. /opt/conda/etc/profile.d/conda.sh
conda activate rlinf
srun --unbuffered --output /scratch/ada/runs/gpu_types/logs/sft/%j_%t_log.out --error /scratch/ada/runs/gpu_types/logs/sft/%j_%t_log.err --cpus-per-task=1 --export=ALL --kill-on-bad-exit=1 /home/ada/rlinf/.venv/bin/python -u -m launchers.job_entrypoint '{"module": "stages", "argv": ["sft", "--config", "/scratch/ada/runs/gpu_types/config.yaml", "--out", "/scratch/ada/runs/gpu_types/sft", "--iteration", "0"], "exit_code_dir": "/scratch/ada/runs/gpu_types/logs/sft", "speed_weights": [], "allow_requeue": true}'
