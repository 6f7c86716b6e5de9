#!/bin/bash
#SBATCH --account=hpc-rl
#SBATCH --cpus-per-task=2
#SBATCH --error=/scratch/ada/runs/per_cpu_memory/logs/sync/%j_0_log.err
#SBATCH --job-name=sync-0
#SBATCH --mem-per-cpu=1900M
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/per_cpu_memory/logs/sync/%j_0_log.out
#SBATCH --partition=normal
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
srun --unbuffered --output /scratch/ada/runs/per_cpu_memory/logs/sync/%j_%t_log.out --error /scratch/ada/runs/per_cpu_memory/logs/sync/%j_%t_log.err --cpus-per-task=2 --export=ALL --kill-on-bad-exit=1 /home/ada/rlinf/.venv/bin/python -u -m launchers.job_entrypoint '{"module": "stages", "argv": ["sync", "--config", "/scratch/ada/runs/per_cpu_memory/config.yaml", "--out", "/scratch/ada/runs/per_cpu_memory/it/0000/sync", "--iteration", "0", "--input", "initial=/scratch/ada/runs/per_cpu_memory/sft", "--input", "checkpoint=/scratch/ada/runs/per_cpu_memory/it/0000/train"], "exit_code_dir": "/scratch/ada/runs/per_cpu_memory/logs/sync", "speed_weights": [], "allow_requeue": true}'
