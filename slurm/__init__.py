"""Everything that knows Slurm; also the folder that ``snakemake --profile slurm`` reads."""
