#!/bin/bash
#SBATCH --account=TG-12345
#SBATCH --cpus-per-task=16
#SBATCH --error=/scratch/ada/runs/exclusive_nodes/logs/pools/%j_0_log.err
#SBATCH --gres=gpu:3
#SBATCH --job-name=pool-pool-1-0
#SBATCH --mail-type=FAIL
#SBATCH --mail-user=ada@example.org
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=3
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/exclusive_nodes/logs/pools/%j_0_log.out
#SBATCH --partition=gpu-a100
#SBATCH --signal=USR2@90
#SBATCH --time=480

export GOMP_SPINCOUNT=0
export NCCL_SOCKET_IFNAME=ib0
export OMP_NUM_THREADS=1
export OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH=/home/ada/rlinf
export RLINF_STOP_MARGIN_S=90
module load cuda/12.2 python3/3.11
srun --unbuffered --output /scratch/ada/runs/exclusive_nodes/logs/pools/%j_%t_log.out --error /scratch/ada/runs/exclusive_nodes/logs/pools/%j_%t_log.err --cpus-per-task=16 --export=ALL --kill-on-bad-exit=1 --distribution=block:block /home/ada/rlinf/.venv/bin/python -u -m launchers.job_entrypoint '{"module": "stages.worker.main", "argv": ["--run", "/scratch/ada/runs/exclusive_nodes", "--name", "pool-1-0", "--orphan-s", "600.0"], "exit_code_dir": "/scratch/ada/runs/exclusive_nodes/logs/pools", "speed_weights": [], "allow_requeue": false}'
