#!/bin/bash
#SBATCH --cpus-per-task=1
#SBATCH --error=/scratch/ada/runs/cpu_only/logs/driver/%j_0_log.err
#SBATCH --export=NONE
#SBATCH --job-name=driver-cpu_only
#SBATCH --mem=4000M
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/cpu_only/logs/driver/%j_0_log.out
#SBATCH --partition=batch
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=1440

export GOMP_SPINCOUNT=0
export OMP_NUM_THREADS=1
export OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH=/home/ada/rlinf
export RLINF_STOP_MARGIN_S=90
. /opt/conda/etc/profile.d/conda.sh
conda activate rlinf
srun --unbuffered --output /scratch/ada/runs/cpu_only/logs/driver/%j_%t_log.out --error /scratch/ada/runs/cpu_only/logs/driver/%j_%t_log.err --cpus-per-task=1 --export=ALL --kill-on-bad-exit=1 /home/ada/rlinf/.venv/bin/python -u -m launchers.job_entrypoint '{"module": "pipeline.commands.driver_job", "argv": ["/scratch/ada/runs/cpu_only", "--iterations", "2"], "exit_code_dir": "/scratch/ada/runs/cpu_only/logs/driver", "speed_weights": [], "allow_requeue": true}'
code=$?
# Killed by a signal, for example for lack of memory. After many quick kills it is not restarted.
if [ $code -gt 128 ] && [ $SECONDS -ge 600 -o "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; then
  /home/ada/rlinf/.venv/bin/python -m slurm.requeue && sleep 60
fi
exit $code
