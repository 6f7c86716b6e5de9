"""The workflow, stage by stage.

    snakemake -c2                                        # on this machine
    snakemake --profile slurm                            # every stage a Slurm job
    snakemake --profile slurm --config experiment=cartpole_ppo iterations=20

The configuration is composed once by Hydra (rule compose), and every stage reads that file. Which
stage feeds which comes from the experiment's flow, resources from its plan.
"""

import sys

# The graph is built recursively, one level per job of the chain.
sys.setrecursionlimit(1_000_000)

from rlinf import tree

tree.activate()

from pipeline import workflow as flowing

run = flowing.prepare(config)


wildcard_constraints:
    i=r"\d+",


localrules:
    all,
    report,


rule all:
    input:
        run.report,
        default_target=True
