#!/bin/bash
#SBATCH --account=hpc-rl
#SBATCH --cpus-per-task=8
#SBATCH --error=/scratch/ada/runs/per_cpu_memory/logs/train/%j_0_log.err
#SBATCH --gres=gpu:4
#SBATCH --job-name=train-0
#SBATCH --mem=120000M
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/per_cpu_memory/logs/train/%j_0_log.out
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=120

export GOMP_SPINCOUNT=0
export OMP_NUM_THREADS=1
export OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH=/home/ada/rlinf
export RLINF_STOP_MARGIN_S=90
module purge
module load cuda/12.4
srun --unbuffered --output /scratch/ada/runs/per_cpu_memory/logs/train/%j_%t_log.out --error /scratch/ada/runs/per_cpu_memory/logs/train/%j_%t_log.err --cpus-per-task=8 --export=ALL --kill-on-bad-exit=1 --distribution=block:block /home/ada/rlinf/.venv/bin/python -u -m launchers.job_entrypoint '{"module": "stages", "argv": ["train", "--config", "/scratch/ada/runs/per_cpu_memory/config.yaml", "--out", "/scratch/ada/runs/per_cpu_memory/it/0000/train", "--iteration", "0", "--input", "trajectories=/scratch/ada/runs/per_cpu_memory/it/0000/rollout", "--input", "rewards=/scratch/ada/runs/per_cpu_memory/it/0000/reward", "--input", "logprobs=/scratch/ada/runs/per_cpu_memory/it/0000/inference", "--input", "initial=/scratch/ada/runs/per_cpu_memory/sft"], "exit_code_dir": "/scratch/ada/runs/per_cpu_memory/logs/train", "speed_weights": [], "allow_requeue": true}'
