#!/bin/bash
#SBATCH --cpus-per-task=8
#SBATCH --error=/scratch/ada/runs/containers/logs/inference/%j_0_log.err
#SBATCH --gres=gpu:h100:8
#SBATCH --job-name=inference-0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/containers/logs/inference/%j_0_log.out
#SBATCH --partition=h100
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=240

export GOMP_SPINCOUNT=0
export HF_HOME=/scratch/hf
export OMP_NUM_THREADS=1
export OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH=/home/ada/rlinf
export RLINF_STOP_MARGIN_S=90
srun --unbuffered --output /scratch/ada/runs/containers/logs/inference/%j_%t_log.out --error /scratch/ada/runs/containers/logs/inference/%j_%t_log.err --cpus-per-task=8 --export=ALL --kill-on-bad-exit=1 --distribution=block:block --container-image=/images/rlinf.sqsh --container-mounts=/scratch:/scratch --container-workdir=/scratch python3 -u -m launchers.job_entrypoint '{"module": "stages", "argv": ["inference", "--config", "/scratch/ada/runs/containers/config.yaml", "--out", "/scratch/ada/runs/containers/it/0000/inference", "--iteration", "0", "--input", "trajectories=/scratch/ada/runs/containers/it/0000/rollout", "--input", "initial=/scratch/ada/runs/containers/sft", "--input", "weights=/scratch/ada/runs/containers/sft"], "exit_code_dir": "/scratch/ada/runs/containers/logs/inference", "speed_weights": [], "allow_requeue": true}'
