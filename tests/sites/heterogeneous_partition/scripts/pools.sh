#!/bin/bash
#SBATCH --account=chair
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:a100:4
#SBATCH --job-name=pool-pool-0-0
#SBATCH --mem=240000M
#SBATCH --no-requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/heterogeneous_partition/logs/pools/%j_batch.log
#SBATCH --partition=main
#SBATCH --qos=rl
#SBATCH --signal=USR2@90
#SBATCH --time=720
#SBATCH hetjob
#SBATCH --account=chair
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:h100:8
#SBATCH --job-name=pool-pool-1-0
#SBATCH --mem=240000M
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=/scratch/ada/runs/heterogeneous_partition/logs/pools/%j_batch.log
#SBATCH --partition=main
#SBATCH --qos=rl
#SBATCH --signal=USR2@90
#SBATCH --time=720

srun --unbuffered --output /scratch/ada/runs/heterogeneous_partition/logs/pools/"$SLURM_JOB_ID"+0_%t_log.out --error /scratch/ada/runs/heterogeneous_partition/logs/pools/"$SLURM_JOB_ID"+0_%t_log.err --het-group=0 --cpus-per-task=8 --export=ALL --kill-on-bad-exit=1 --distribution=block:block bash -c 'export GOMP_SPINCOUNT=0
export OMP_NUM_THREADS=1
export OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH=/home/ada/rlinf
export RLINF_STOP_MARGIN_S=90
export RLINF_HET_GROUPS=0
exec /home/ada/rlinf/.venv/bin/python -u -m launchers.job_entrypoint '"'"'{"module": "stages.worker.main", "argv": ["--run", "/scratch/ada/runs/heterogeneous_partition", "--name", "pool-0-0", "--orphan-s", "600.0"], "exit_code_dir": "/scratch/ada/runs/heterogeneous_partition/logs/pools", "speed_weights": [], "allow_requeue": false}'"'"'' &
srun --unbuffered --output /scratch/ada/runs/heterogeneous_partition/logs/pools/"$SLURM_JOB_ID"+1_%t_log.out --error /scratch/ada/runs/heterogeneous_partition/logs/pools/"$SLURM_JOB_ID"+1_%t_log.err --het-group=1 --cpus-per-task=8 --export=ALL --kill-on-bad-exit=1 --distribution=block:block bash -c 'export GOMP_SPINCOUNT=0
export OMP_NUM_THREADS=1
export OMP_WAIT_POLICY=PASSIVE
export PYTHONPATH=/home/ada/rlinf
export RLINF_STOP_MARGIN_S=90
export RLINF_HET_GROUPS=1
exec /home/ada/rlinf/.venv/bin/python -u -m launchers.job_entrypoint '"'"'{"module": "stages.worker.main", "argv": ["--run", "/scratch/ada/runs/heterogeneous_partition", "--name", "pool-1-0", "--orphan-s", "600.0"], "exit_code_dir": "/scratch/ada/runs/heterogeneous_partition/logs/pools", "speed_weights": [], "allow_requeue": false}'"'"'' &

code=0
for _ in $(seq 2); do
  wait -n && continue
  code=$?
  # A process that stops for a requeue ends with this code, and the others will too.
  if [ $code != 75 ]; then
    # The others get time to write a checkpoint, for example; their driver may end them sooner.
    others=$(jobs -p)
    ( sleep 90; kill $others ) 2> /dev/null &
    timer=$!
    wait $others
    kill $timer
    break
  fi
done
wait
exit $code
