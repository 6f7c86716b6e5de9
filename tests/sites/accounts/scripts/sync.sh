#!/bin/bash
#SBATCH --account=main
#SBATCH --cpus-per-task=4
#SBATCH --error=/scratch/ada/runs/accounts/logs/sync/%j_0_log.err
#SBATCH --job-name=sync-0
#SBATCH --mem=32000M
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/accounts/logs/sync/%j_0_log.out
#SBATCH --partition=cpu
#SBATCH --qos=long
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=1440

export GOMP_SPINCOUNT=0
export OMP_NUM_THREADS=1
export OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH=/home/ada/rlinf
export RLINF_STOP_MARGIN_S=90
srun --unbuffered --output /scratch/ada/runs/accounts/logs/sync/%j_%t_log.out --error /scratch/ada/runs/accounts/logs/sync/%j_%t_log.err --cpus-per-task=4 --export=ALL --kill-on-bad-exit=1 /home/ada/rlinf/.venv/bin/python -u -m launchers.job_entrypoint '{"module": "stages", "argv": ["sync", "--config", "/scratch/ada/runs/accounts/config.yaml", "--out", "/scratch/ada/runs/accounts/it/0000/sync", "--iteration", "0", "--input", "initial=/scratch/ada/runs/accounts/sft", "--input", "checkpoint=/scratch/ada/runs/accounts/it/0000/train"], "exit_code_dir": "/scratch/ada/runs/accounts/logs/sync", "speed_weights": [], "allow_requeue": true}'
