"""How stages become processes: on this machine, or as Slurm jobs. Knows nothing of what they do."""
