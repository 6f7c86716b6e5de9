#!/bin/bash
#SBATCH --cpus-per-task=8
#SBATCH --error=/scratch/ada/runs/containers/logs/rollout/%j_0_log.err
#SBATCH --gres=gpu:a100:4
#SBATCH --job-name=rollout-0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/containers/logs/rollout/%j_0_log.out
#SBATCH --partition=a100
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=240

export GOMP_SPINCOUNT=0
export HF_HOME=/scratch/hf
export OMP_NUM_THREADS=1
export OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH=/home/ada/rlinf
export RLINF_STOP_MARGIN_S=90
module load apptainer
srun --unbuffered --output /scratch/ada/runs/containers/logs/rollout/%j_%t_log.out --error /scratch/ada/runs/containers/logs/rollout/%j_%t_log.err --cpus-per-task=8 --export=ALL --kill-on-bad-exit=1 --distribution=block:block apptainer exec --nv --bind /scratch /images/rlinf.sif python3 -u -m launchers.job_entrypoint '{"module": "stages", "argv": ["rollout", "--config", "/scratch/ada/runs/containers/config.yaml", "--out", "/scratch/ada/runs/containers/it/0000/rollout", "--iteration", "0", "--input", "weights=/scratch/ada/runs/containers/sft"], "exit_code_dir": "/scratch/ada/runs/containers/logs/rollout", "speed_weights": [], "allow_requeue": true}'
