#!/bin/bash
#SBATCH --comment=rl
#SBATCH --constraint=hbm80g
#SBATCH --cpus-per-task=8
#SBATCH --error=/scratch/ada/runs/gpu_types/logs/train/%j_0_log.err
#SBATCH --gres=gpu:a100:4
#SBATCH --job-name=train-0
#SBATCH --mem=200000M
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/gpu_types/logs/train/%j_0_log.out
#SBATCH --partition=gpu
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
srun --unbuffered --output /scratch/ada/runs/gpu_types/logs/train/%j_%t_log.out --error /scratch/ada/runs/gpu_types/logs/train/%j_%t_log.err --cpus-per-task=8 --export=ALL --kill-on-bad-exit=1 --distribution=block:block --cpu-bind=cores /home/ada/rlinf/.venv/bin/python -u -m launchers.job_entrypoint '{"module": "stages", "argv": ["train", "--config", "/scratch/ada/runs/gpu_types/config.yaml", "--out", "/scratch/ada/runs/gpu_types/it/0000/train", "--iteration", "0", "--input", "trajectories=/scratch/ada/runs/gpu_types/it/0000/rollout", "--input", "rewards=/scratch/ada/runs/gpu_types/it/0000/reward", "--input", "logprobs=/scratch/ada/runs/gpu_types/it/0000/inference", "--input", "initial=/scratch/ada/runs/gpu_types/sft"], "exit_code_dir": "/scratch/ada/runs/gpu_types/logs/train", "speed_weights": [], "allow_requeue": true}'
