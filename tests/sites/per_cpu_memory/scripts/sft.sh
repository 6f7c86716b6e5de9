#!/bin/bash
#SBATCH --account=hpc-rl
#SBATCH --cpus-per-task=2
#SBATCH --error=/scratch/ada/runs/per_cpu_memory/logs/sft/%j_0_log.err
#SBATCH --job-name=sft-0
#SBATCH --mem-per-cpu=1900M
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/per_cpu_memory/logs/sft/%j_0_log.out
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
srun --unbuffered --output /scratch/ada/runs/per_cpu_memory/logs/sft/%j_%t_log.out --error /scratch/ada/runs/per_cpu_memory/logs/sft/%j_%t_log.err --cpus-per-task=2 --export=ALL --kill-on-bad-exit=1 /home/ada/rlinf/.venv/bin/python -u -m launchers.job_entrypoint '{"module": "stages", "argv": ["sft", "--config", "/scratch/ada/runs/per_cpu_memory/config.yaml", "--out", "/scratch/ada/runs/per_cpu_memory/sft", "--iteration", "0"], "exit_code_dir": "/scratch/ada/runs/per_cpu_memory/logs/sft", "speed_weights": [], "allow_requeue": true}'
