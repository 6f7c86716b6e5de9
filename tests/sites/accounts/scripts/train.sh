#!/bin/bash
#SBATCH --account=ai
#SBATCH --cpus-per-task=12
#SBATCH --error=/scratch/ada/runs/accounts/logs/train/%j_0_log.err
#SBATCH --gres=gpu:h100:8
#SBATCH --job-name=train-0
#SBATCH --mem=1600000M
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/accounts/logs/train/%j_0_log.out
#SBATCH --partition=gpu
#SBATCH --qos=gpu
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=1440

export GOMP_SPINCOUNT=0
export OMP_NUM_THREADS=1
export OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH=/home/ada/rlinf
export RLINF_STOP_MARGIN_S=90
srun --unbuffered --output /scratch/ada/runs/accounts/logs/train/%j_%t_log.out --error /scratch/ada/runs/accounts/logs/train/%j_%t_log.err --cpus-per-task=12 --export=ALL --kill-on-bad-exit=1 --distribution=block:block /home/ada/rlinf/.venv/bin/python -u -m launchers.job_entrypoint '{"module": "stages", "argv": ["train", "--config", "/scratch/ada/runs/accounts/config.yaml", "--out", "/scratch/ada/runs/accounts/it/0000/train", "--iteration", "0", "--input", "trajectories=/scratch/ada/runs/accounts/it/0000/rollout", "--input", "rewards=/scratch/ada/runs/accounts/it/0000/reward", "--input", "logprobs=/scratch/ada/runs/accounts/it/0000/inference", "--input", "initial=/scratch/ada/runs/accounts/sft"], "exit_code_dir": "/scratch/ada/runs/accounts/logs/train", "speed_weights": [], "allow_requeue": true}'
