"""The Slurm package: all code that depends on Slurm, and the folder of ``snakemake --profile
slurm``."""
