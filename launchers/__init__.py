"""Launchers: they run stages as processes on this machine or as Slurm jobs."""
