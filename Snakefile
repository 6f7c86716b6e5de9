# The workflow, stage by stage.
#
#     snakemake -c2                                    four small iterations, on this machine
#     snakemake --profile slurm                        every stage a Slurm job
#     snakemake -c2 --config experiment=cartpole_ppo iterations=20 rollout__batch_size=32
#     snakemake -c2 --config experiment=cartpole_ppo rollout='{batch_size: 32, horizon: 200}'
#     snakemake -c2 --config run=cartpole_ppo          continue a run unchanged, and report
#     snakemake --profile slurm --config experiment=arithmetic_grpo jobs=iteration
#
# The configuration is composed once, stored in the run directory, and read by every stage. The
# flow of the experiment connects the stages; its plan defines the resources of each stage.
import sys

from rlinf import package_paths

package_paths.add_to_sys_path()

from pipeline.commands import workflow as rlinf_workflow
from rlinf.errors import RlinfError

# Snakemake builds the graph recursively, one level per job of the longest chain.
sys.setrecursionlimit(1_000_000)

try:
    dry = workflow.output_settings.dryrun
    run = rlinf_workflow.prepare_workflow(config, is_driver=workflow.is_main_process, dry_run=dry)
    if workflow.is_main_process and not dry:
        run.check_resumable()
except RlinfError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


onstart:
    run.acquire_lock()


localrules:
    all,
    profile,
    plan,
    report,


rule all:
    input:
        run.report,


# Runs only if requested: snakemake -c1 plan. The next start of the workflow uses the plan.
rule plan:
    input:
        run.profile,
    output:
        run.plan_page,
    log:
        run.log("plan"),
    conda:
        "configs/environment.yaml"
    params:
        python=run.python,
        folder=run.folder,
        plan=run.plan_file,
    shell:
        "{params.python} -m rlinf plan {params.folder:q} --profile {input:q}"
        " --out {params.plan:q} > {log:q} 2>&1"


for stage in run.setup_stages:

    rule:
        name:
            stage
        output:
            run.output(stage),
        log:
            run.log(stage),
        conda:
            "configs/environment.yaml"
        resources:
            **run.resources(stage),
        params:
            module=run.module(stage),
            program=run.program(stage),
            argv=run.argv(stage),
        shell:
            "{params.program} {params.argv:q} > {log:q} 2>&1"


for stage in run.iteration_rules:

    rule:
        name:
            stage
        input:
            unpack(run.inputs(stage)),
        output:
            run.output(stage),
        log:
            run.log(stage),
        conda:
            "configs/environment.yaml"
        resources:
            **run.resources(stage),
        params:
            module=run.module(stage),
            program=run.program(stage),
            argv=run.argv(stage),
        shell:
            "{params.program} {params.argv:q} > {log:q} 2>&1"


# Runs only if requested: snakemake -c1 profile
rule profile:
    input:
        run.output("sft"),
    output:
        run.profile,
    log:
        run.log("profile"),
    conda:
        "configs/environment.yaml"
    params:
        python=run.python,
        folder=run.folder,
    shell:
        "{params.python} -m rlinf profile {params.folder:q} --out {output:q} > {log:q} 2>&1"


rule report:
    input:
        run.targets(),
    output:
        report(run.report, category="Run"),
    log:
        run.log("report"),
    conda:
        "configs/environment.yaml"
    params:
        python=run.python,
        folder=run.folder,
    shell:
        "{params.python} -m rlinf report {params.folder:q} > {log:q} 2>&1"
