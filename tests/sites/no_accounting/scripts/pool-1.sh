#!/bin/bash
#SBATCH --comment='course project'
#SBATCH --constraint=lab
#SBATCH --cpus-per-task=4
#SBATCH --error=/scratch/ada/runs/no_accounting/logs/pools/%j_0_log.err
#SBATCH --exclude=box2
#SBATCH --gres=gpu:4
#SBATCH --job-name=pool-pool-1-0
#SBATCH --mail-type=NONE
#SBATCH --mem=16000M
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/no_accounting/logs/pools/%j_0_log.out
#SBATCH --partition=lab
#SBATCH --signal=USR2@90
#SBATCH --wckey=rl

export GOMP_SPINCOUNT=0
export OMP_NUM_THREADS=1
export OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH=/home/ada/rlinf
export RLINF_STOP_MARGIN_S=90
srun --unbuffered --output /scratch/ada/runs/no_accounting/logs/pools/%j_%t_log.out --error /scratch/ada/runs/no_accounting/logs/pools/%j_%t_log.err --cpus-per-task=4 --export=ALL --kill-on-bad-exit=1 --distribution=block:block /home/ada/rlinf/.venv/bin/python -u -m launchers.job_entrypoint '{"module": "stages.worker.main", "argv": ["--run", "/scratch/ada/runs/no_accounting", "--name", "pool-1-0", "--orphan-s", "600.0"], "exit_code_dir": "/scratch/ada/runs/no_accounting/logs/pools", "speed_weights": [], "allow_requeue": false}'
