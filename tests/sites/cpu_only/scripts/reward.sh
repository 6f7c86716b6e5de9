#!/bin/bash
#SBATCH --cpus-per-task=4
#SBATCH --error=/scratch/ada/runs/cpu_only/logs/reward/%j_0_log.err
#SBATCH --export=NONE
#SBATCH --job-name=reward-0
#SBATCH --mem=8000M
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/cpu_only/logs/reward/%j_0_log.out
#SBATCH --partition=batch
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=300

export GOMP_SPINCOUNT=0
export OMP_NUM_THREADS=1
export OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH=/home/ada/rlinf
export RLINF_STOP_MARGIN_S=90
. /opt/conda/etc/profile.d/conda.sh
conda activate rlinf
srun --unbuffered --output /scratch/ada/runs/cpu_only/logs/reward/%j_%t_log.out --error /scratch/ada/runs/cpu_only/logs/reward/%j_%t_log.err --cpus-per-task=4 --export=ALL --kill-on-bad-exit=1 /home/ada/rlinf/.venv/bin/python -u -m launchers.job_entrypoint '{"module": "stages", "argv": ["reward", "--config", "/scratch/ada/runs/cpu_only/config.yaml", "--out", "/scratch/ada/runs/cpu_only/it/0000/reward", "--iteration", "0", "--input", "trajectories=/scratch/ada/runs/cpu_only/it/0000/rollout", "--input", "initial=/scratch/ada/runs/cpu_only/sft"], "exit_code_dir": "/scratch/ada/runs/cpu_only/logs/reward", "speed_weights": [], "allow_requeue": true}'
