#!/bin/bash
#SBATCH --comment='course project'
#SBATCH --cpus-per-task=4
#SBATCH --error=/scratch/ada/runs/no_accounting/logs/pools/%j_0_log.err
#SBATCH --gres=gpu:1
#SBATCH --job-name=pool-pool-0w1-0
#SBATCH --mail-type=NONE
#SBATCH --mem=16000M
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/no_accounting/logs/pools/%j_0_log.out
#SBATCH --partition=idle
#SBATCH --signal=USR2@50
#SBATCH --wckey=rl

export GOMP_SPINCOUNT=0
export OMP_NUM_THREADS=1
export OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH=/home/ada/rlinf
export RLINF_STOP_MARGIN_S=50
srun --unbuffered --output /scratch/ada/runs/no_accounting/logs/pools/%j_%t_log.out --error /scratch/ada/runs/no_accounting/logs/pools/%j_%t_log.err --cpus-per-task=4 --export=ALL --kill-on-bad-exit=1 /home/ada/rlinf/.venv/bin/python -u -m launchers.job_entrypoint '{"module": "stages.worker.main", "argv": ["--run", "/scratch/ada/runs/no_accounting", "--name", "pool-0w1-0", "--orphan-s", "600.0"], "exit_code_dir": "/scratch/ada/runs/no_accounting/logs/pools", "speed_weights": [], "allow_requeue": false}'
