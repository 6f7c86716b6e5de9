#!/bin/bash
#SBATCH --cpus-per-task=1
#SBATCH --error=/scratch/ada/runs/containers/logs/reward/%j_0_log.err
#SBATCH --job-name=reward-0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/containers/logs/reward/%j_0_log.out
#SBATCH --partition=services
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=240

export GOMP_SPINCOUNT=0
export HF_HOME=/scratch/hf
export OMP_NUM_THREADS=1
export OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH=/home/ada/rlinf
export RLINF_STOP_MARGIN_S=90
srun --unbuffered --output /scratch/ada/runs/containers/logs/reward/%j_%t_log.out --error /scratch/ada/runs/containers/logs/reward/%j_%t_log.err --cpus-per-task=1 --export=ALL --kill-on-bad-exit=1 apptainer exec --bind /scratch /images/rlinf.sif python3 -u -m launchers.job_entrypoint '{"module": "stages", "argv": ["reward", "--config", "/scratch/ada/runs/containers/config.yaml", "--out", "/scratch/ada/runs/containers/it/0000/reward", "--iteration", "0", "--input", "trajectories=/scratch/ada/runs/containers/it/0000/rollout", "--input", "initial=/scratch/ada/runs/containers/sft"], "exit_code_dir": "/scratch/ada/runs/containers/logs/reward", "speed_weights": [], "allow_requeue": true}'
