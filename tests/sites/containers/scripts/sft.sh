#!/bin/bash
#SBATCH --cpus-per-task=1
#SBATCH --error=/scratch/ada/runs/containers/logs/sft/%j_0_log.err
#SBATCH --job-name=sft-0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/containers/logs/sft/%j_0_log.out
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
srun --unbuffered --output /scratch/ada/runs/containers/logs/sft/%j_%t_log.out --error /scratch/ada/runs/containers/logs/sft/%j_%t_log.err --cpus-per-task=1 --export=ALL --kill-on-bad-exit=1 apptainer exec --bind /scratch /images/rlinf.sif python3 -u -m launchers.job_entrypoint '{"module": "stages", "argv": ["sft", "--config", "/scratch/ada/runs/containers/config.yaml", "--out", "/scratch/ada/runs/containers/sft", "--iteration", "0"], "exit_code_dir": "/scratch/ada/runs/containers/logs/sft", "speed_weights": [], "allow_requeue": true}'
