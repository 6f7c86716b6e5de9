"""The ``rlinf`` command."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rlinf import __version__, package_paths, process_tuning
from rlinf.errors import ConfigError, RlinfError, translate_resource_errors
from rlinf.user_code import translate_user_errors

app = typer.Typer(
    help="Reinforcement-learning post-training on Slurm, without Ray and without daemons.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
RunFolder = Annotated[Path, typer.Argument(help="A run directory, such as runs/arithmetic_grpo")]


RunOrOverrides = Annotated[
    list[str],
    typer.Argument(help="A run directory and key=value, or experiment=NAME and key=value"),
]
Overrides = Annotated[
    list[str], typer.Argument(help="experiment=NAME and key=value, as for rlinf.launch")
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Write sbatch scripts, configuration and plan to a folder; submit nothing"
    ),
]
Redo = Annotated[
    bool,
    typer.Option(
        "--redo",
        help="Recompute results of another configuration or code, and archive the old ones",
    ),
]
Keep = Annotated[
    bool, typer.Option("--keep", help="Accept such results; the run records the differences")
]


class ExecutionMode(StrEnum):
    """Execution of a plan: as jobs or in pools."""

    jobs = "jobs"
    pools = "pools"


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and exit")] = False,
) -> None:
    """Reinforcement-learning post-training on Slurm, without Ray and without daemons."""
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    overrides: Overrides,
    dry_run: DryRun = False,
    redo: Redo = False,
    keep: Keep = False,
) -> None:
    """Compose an experiment and run it (the same as python -m rlinf.launch).

    Hydra's own options are accepted too: -m for a sweep, --config-dir for your own configuration
    folder.
    """
    if dry_run:
        from pipeline.commands.submit import write_dry_run as write

        typer.echo("\n".join(write(overrides, None)))
        return
    from rlinf.launch import main as launch

    raise typer.Exit(launch([*overrides, *["--redo"] * redo, *["--keep"] * keep]))


@app.command()
def resume(
    folder: RunFolder,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value, changes of the run's configuration, as for rlinf run"),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="inprocess, local or slurm; as before by default")
    ] = None,
    redo: Redo = False,
    keep: Keep = False,
) -> None:
    """Resume a run from its committed results, with changed settings if overrides are given."""
    from pipeline.commands.experiment import drive, reopen_run
    from pipeline.resume import OnMismatch
    from pipeline.run import Run

    choice, launcher = (
        OnMismatch.from_flags(redo=redo, keep=keep),
        {"launcher": cluster} if cluster else None,
    )
    if overrides:
        report = drive(reopen_run(folder, overrides, choice), launcher)
    else:
        report = drive(Run.open(folder), launcher, choice)
    typer.echo(f"report: {report}")


@app.command()
def submit(
    what: RunOrOverrides,
    partition: Annotated[
        str | None, typer.Option(help="Of the driver's job; the cluster's default one by default")
    ] = None,
    time_limit_min: Annotated[
        int | None, typer.Option(help="Its wall-time limit, minutes; a day by default", min=1)
    ] = None,
    mem_mb: Annotated[int | None, typer.Option(help="Its memory, MiB", min=1)] = None,
    mail: Annotated[
        str | None, typer.Option(help="Whom Slurm is to tell when the driver ends or fails")
    ] = None,
    dry_run: DryRun = False,
    redo: Redo = False,
    keep: Keep = False,
) -> None:
    """Check an experiment, or a run to resume, and submit its driver as a small Slurm job."""
    from pipeline.commands import submit as submission
    from pipeline.resume import OnMismatch

    options = {
        "partition": partition,
        "time_limit_min": time_limit_min,
        "mem_mb": mem_mb,
        "mail": mail,
    }
    driver = {key: value for key, value in options.items() if value is not None}
    choice = OnMismatch.from_flags(redo=redo, keep=keep)
    lines = (
        submission.write_dry_run(what, driver)
        if dry_run
        else submission.submit_run(what, driver, choice)
    )
    typer.echo("\n".join(lines))


@app.command()
def stop(folder: RunFolder) -> None:
    """Stop the driver, pools and jobs of a run, wherever they are. The run can be resumed."""
    from pipeline.commands.stop import stop_run as end

    for line in end(folder) or ["nothing of this run was there"]:
        typer.echo(line)
    typer.echo(f"continue with: rlinf resume {folder}, or rlinf submit {folder}")


@app.command()
def status(
    folder: RunFolder,
    watch: Annotated[bool, typer.Option(help="Refresh until the run is finished")] = False,
) -> None:
    """Show the state of a run: iteration, stage, jobs, rates, time left."""
    from pipeline.commands.status import show_status

    show_status(folder, watch=watch)


@app.command()
def scale(
    folder: RunFolder,
    wish: Annotated[str, typer.Argument(help="rollout+2, rollout-1, rollout=4 or rollout=auto")],
) -> None:
    """Request more or fewer workers of an elastic pool, before or during a run."""
    from pipeline.pools.autoscaler import request_scale as ask
    from pipeline.run import Run

    typer.echo(f"{ask(Run.open(folder), wish)} workers requested")


@app.command()
def report(
    folder: RunFolder,
    png: Annotated[
        bool, typer.Option("--png", help="Write the main charts as pictures too")
    ] = False,
) -> None:
    """Rewrite report.html."""
    from pipeline.metrics import rewrite_metrics
    from pipeline.report import write_report
    from pipeline.run import Run

    opened = Run.open(folder)
    rewrite_metrics(opened.folder)
    typer.echo(f"report: {write_report(opened.folder, pictures=png)}")


@app.command()
def export(
    folder: RunFolder,
    to: Annotated[Path, typer.Argument(help="New folder for the model")],
    weights: Annotated[
        int | None, typer.Option("--version", help="Version of the weights; the newest by default")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The version with the best held-out score")
    ] = False,
) -> None:
    """Copy a version of the weights out of a run, as an ordinary model folder."""
    from pipeline.commands.export import best_version, export_weights

    if best and weights is not None:
        raise ConfigError("--best and --version both choose the weights: give one of them")
    note = ""
    if best:
        weights, score = best_version(folder)
        note = f" (after iteration {weights}, the best held-out score: {score:.3g})"
    typer.echo(f"version {export_weights(folder, to, weights)}{note} in {to}")


@app.command()
def demonstrations(
    source: Annotated[
        Path, typer.Argument(help="A data set of LeRobot, or a folder of trajectories-*.h5")
    ],
    to: Annotated[Path, typer.Argument(help="New folder")],
    solved: Annotated[
        bool, typer.Option("--solved", help="Of LeRobot: every episode solved its task")
    ] = False,
    fps: Annotated[int, typer.Option(min=1, help="For LeRobot: steps of a second")] = 20,
    task: Annotated[str, typer.Option(help="For LeRobot: what was to be done")] = "",
    png: Annotated[
        bool, typer.Option("--png", help="For LeRobot: pictures without a loss, not as videos")
    ] = False,
    intervened: Annotated[
        bool,
        typer.Option("--intervened", help="Of trajectories: those episodes that a person acted in"),
    ] = False,
) -> None:
    """Convert LeRobot demonstrations to trajectories, or trajectories to LeRobot; with
    --intervened, extract the episodes in which a person acted, for algorithm.offline_data."""
    from pipeline.commands.demonstrations import convert_demonstrations, extract_interventions

    if intervened:
        typer.echo(extract_interventions(source, to))
    else:
        typer.echo(convert_demonstrations(source, to, fps=fps, task=task, png=png, solved=solved))


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A .gguf file, or a package that carries one")],
    to: Annotated[Path, typer.Argument(help="New folder for the model")],
) -> None:
    """Convert a GGUF file to a model folder for model.path."""
    from rlinf.models.gguf import convert_gguf

    convert_gguf(source, to)
    typer.echo(f"{to}: a model folder in float32")


@app.command()
def doctor(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="With --env: keys of the task, task.KEY=VALUE")
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="Where runs are kept; must be visible on every node")
    ] = Path("runs"),
    env: Annotated[
        str | None,
        typer.Option(help="Check instead what the simulator of task=NAME lacks on this machine"),
    ] = None,
) -> None:
    """Check Slurm, the run directory's filesystem, Python on the nodes, and packages."""
    from pipeline.commands import doctor

    if overrides and env is None:
        raise ConfigError(f"{overrides[0]}: keys are for the simulator of --env NAME; add that")
    found = (
        doctor.check_machine(folder)
        if env is None
        else doctor.check_simulator(env, overrides or ())
    )
    raise typer.Exit(doctor.show_findings(found))


@app.command()
def inventory(
    save: Annotated[Path | None, typer.Option(help="Write it to this file, as JSON")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Read a saved inventory instead of querying Slurm")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
    site: Annotated[
        Path | None, typer.Option(help="Site file that describes the partitions' hardware")
    ] = None,
) -> None:
    """Show what the cluster has: partitions, GPUs, free nodes, limits, load."""
    from pipeline.inventory import show_inventory

    show_inventory(source, save, site, as_json=as_json)


@app.command()
def plan(
    what: RunOrOverrides,
    profile: Annotated[
        Path | None,
        typer.Option(help="What rlinf profile measured; profile.json, or else data sheets"),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="A saved inventory, instead of querying Slurm")
    ] = None,
    site: Annotated[
        Path | None, typer.Option(help="Site file; that of the cluster section by default")
    ] = None,
    partition: Annotated[
        list[str] | None, typer.Option(help="Use these partitions alone; may be repeated")
    ] = None,
    objective: Annotated[
        str, typer.Option(help="time, gpu-hours, money, or time-to-end (queue and losses included)")
    ] = "time",
    pin: Annotated[
        list[str] | None, typer.Option(help="STAGE=KIND, such as train=h100; may be repeated")
    ] = None,
    what_if: Annotated[
        list[str] | None, typer.Option(help="KIND=NUMBER of devices; may be repeated")
    ] = None,
    execution: Annotated[
        ExecutionMode,
        typer.Option(help="A job for each stage, or pools over a segment of many iterations"),
    ] = ExecutionMode.jobs,
    check: Annotated[
        Path | None, typer.Option(help="Assess this plan instead of making one")
    ] = None,
    out: Annotated[Path, typer.Option(help="The plan; its page is written beside it")] = Path(
        "plan.yaml"
    ),
) -> None:
    """Choose where every stage runs, explain it, and write plan.yaml and plan.html."""
    from pipeline.commands.experiment import load_configuration
    from pipeline.planning.planner.plan_command import run_plan

    usual = Path("profile.json")
    found = profile or (usual if usual.exists() else None)
    sources = planning_sources(found, source, site, partition, pin)
    config = load_configuration(what)
    run_plan(config, sources, out, objective, what_if or (), check, execution.value)


@app.command()
def clean(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Run directories to look through as well")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing")
    ] = False,
) -> None:
    """Remove files that killed processes left: shared memory of this node, temporary files of
    runs."""
    from pipeline.cleanup import clean_up as remove

    for line in remove(folders or [], dry_run=dry_run):
        typer.echo(line)


@app.command()
def replan(
    folder: RunFolder,
    profile: Annotated[
        Path | None, typer.Option(help="Another profile than that of the run's plan")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="With --profile: a saved inventory")
    ] = None,
    site: Annotated[Path | None, typer.Option(help="With --profile: a site file")] = None,
    objective: Annotated[str | None, typer.Option(help="As before by default")] = None,
    apply: Annotated[bool, typer.Option(help="Replace the run's plan")] = False,
) -> None:
    """Compare predicted with actual times of a run, and plan again with the measured
    corrections."""
    from pipeline.planning.planner.plan_command import run_replan
    from pipeline.run import Run

    sources = planning_sources(profile, source, site, None, None) if profile else None
    run_replan(Run.open(folder), sources, objective, apply=apply)


def planning_sources(
    profile: Path | None,
    inventory: Path | None,
    site: Path | None,
    partitions: list[str] | None,
    pins: list[str] | None,
) -> Any:
    """Return the inputs of the planner with absolute paths."""
    from pipeline.plan import PlanningSources

    def absolute(path: Path | None) -> str | None:
        return None if path is None else str(path.expanduser().absolute())

    return PlanningSources(
        profile=absolute(profile) or "",
        inventory=absolute(inventory),
        site=absolute(site),
        partitions=tuple(partitions or ()),
        pins=tuple(pins or ()),
    )


@app.command()
def profile(
    what: RunOrOverrides,
    partition: Annotated[
        list[str] | None,
        typer.Option(help="Measure on this partition; may be repeated. The plan's by default"),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time for all measurements", min=0.1)] = 10.0,
    processes: Annotated[
        int | None, typer.Option(help="Most processes per node; one per GPU by default", min=1)
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget what earlier passes measured")
    ] = False,
    out: Annotated[Path, typer.Option(help="The file to write")] = Path("profile.json"),
) -> None:
    """Measure what the stages of an experiment cost on each kind of device."""
    import logging

    from pipeline.commands.experiment import open_run, run_sft
    from pipeline.planning.profile.profile_pass import ProfileOptions
    from pipeline.planning.profile.profile_pass import profile_run as measure

    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("rlinf").setLevel(logging.INFO)
    options = ProfileOptions(tuple(partition or ()), minutes, processes, fresh)
    measured = measure(open_run(what), options, run_sft)
    measured.save(out)
    typer.echo(f"profile: {out}")


@app.command()
def simulate(
    problem: Annotated[
        str, typer.Argument(help="A problem file (YAML), or a study by name, such as 7b-64")
    ],
    plan: Annotated[
        Path | None, typer.Option(help="A plan with pools; by default the planner's best")
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option(help="What goes wrong: a YAML file, or for a study calm, tails, ..., all"),
    ] = None,
    iterations: Annotated[int, typer.Option(min=1)] = 20,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    png: Annotated[Path | None, typer.Option(help="Write a Gantt chart to this file")] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Write chart and table to this file")
    ] = None,
) -> None:
    """Simulate iterations of a placement, with stragglers, preemption, queues and long tails."""
    from pipeline.planning.simulator.simulate_command import run_simulate

    run_simulate(problem, plan, scenario, iterations, seed, png, page)


def main(argv: list[str] | None = None) -> Any:
    """Run the command line. An error is one line; ``rlinf.errors`` lists exit codes."""
    package_paths.add_to_sys_path()
    process_tuning.tune_process()
    try:
        with translate_resource_errors(), translate_user_errors():
            return app(args=argv, prog_name="rlinf")
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
