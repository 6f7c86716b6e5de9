#!/bin/bash
#SBATCH --account=hpc-rl
#SBATCH --cpus-per-task=8
#SBATCH --error=/scratch/ada/runs/per_cpu_memory/logs/inference/%j_0_log.err
#SBATCH --gres=gpu:1
#SBATCH --job-name=inference-0
#SBATCH --mem-per-cpu=3800M
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/per_cpu_memory/logs/inference/%j_0_log.out
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
srun --unbuffered --output /scratch/ada/runs/per_cpu_memory/logs/inference/%j_%t_log.out --error /scratch/ada/runs/per_cpu_memory/logs/inference/%j_%t_log.err --cpus-per-task=8 --export=ALL --kill-on-bad-exit=1 /home/ada/rlinf/.venv/bin/python -u -m launchers.job_entrypoint '{"module": "stages", "argv": ["inference", "--config", "/scratch/ada/runs/per_cpu_memory/config.yaml", "--out", "/scratch/ada/runs/per_cpu_memory/it/0000/inference", "--iteration", "0", "--input", "trajectories=/scratch/ada/runs/per_cpu_memory/it/0000/rollout", "--input", "initial=/scratch/ada/runs/per_cpu_memory/sft", "--input", "weights=/scratch/ada/runs/per_cpu_memory/sft"], "exit_code_dir": "/scratch/ada/runs/per_cpu_memory/logs/inference", "speed_weights": [], "allow_requeue": true}'
