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
    help="Post-train models with reinforcement learning on Slurm, without Ray or daemons.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
RunFolder = Annotated[Path, typer.Argument(help="A run directory, such as runs/arithmetic_grpo")]


RunOrOverrides = Annotated[
    list[str],
    typer.Argument(help="A run directory or experiment=NAME, then overrides key=value"),
]
Overrides = Annotated[list[str], typer.Argument(help="experiment=NAME, then overrides key=value")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Only write the sbatch scripts, configuration and plan to a folder"
    ),
]
DryRunInventory = Annotated[
    Path | None,
    typer.Option("--from", help="With --dry-run: read a saved inventory instead of querying Slurm"),
]
Redo = Annotated[
    bool,
    typer.Option(
        "--redo",
        help="Archive and recompute results of a changed configuration or changed code",
    ),
]
Keep = Annotated[
    bool,
    typer.Option(
        "--keep",
        help="Accept results of a changed configuration or changed code, and record the changes",
    ),
]


class ExecutionMode(StrEnum):
    """Execution of a plan: as jobs or in pools."""

    jobs = "jobs"
    pools = "pools"


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and exit")] = False,
) -> None:
    """Post-train models with reinforcement learning on Slurm, without Ray or daemons."""
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    overrides: Overrides,
    dry_run: DryRun = False,
    source: DryRunInventory = None,
    redo: Redo = False,
    keep: Keep = False,
) -> None:
    """Compose an experiment and run it. An interrupted run continues.

    Hydra's options work too: -m for a sweep, --config-dir for a folder of your own configurations.
    """
    if dry_run:
        from pipeline.commands.driver_job import write_dry_run

        typer.echo("\n".join(write_dry_run(overrides, None, source)))
        return
    _refuse_inventory(source)
    from rlinf.launch import main as launch

    raise typer.Exit(launch([*overrides, *["--redo"] * redo, *["--keep"] * keep]))


@app.command()
def resume(
    folder: RunFolder,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Changes of the run's configuration, key=value"),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="inprocess, local or slurm; default: that of the run")
    ] = None,
    redo: Redo = False,
    keep: Keep = False,
) -> None:
    """Resume a run, optionally with changed settings. Committed results are kept."""
    from pipeline.commands.experiment import drive, reopen_run
    from pipeline.resume import OnMismatch
    from pipeline.run import Run

    on_mismatch = OnMismatch.from_flags(redo=redo, keep=keep)
    launcher = {"launcher": cluster} if cluster else None
    if overrides:
        report = drive(reopen_run(folder, overrides, on_mismatch), launcher)
    else:
        report = drive(Run.open(folder), launcher, on_mismatch)
    typer.echo(f"report: {report}")


@app.command()
def submit(
    run_or_experiment: RunOrOverrides,
    partition: Annotated[
        str | None,
        typer.Option(help="Partition of the driver's job; default: one without GPUs"),
    ] = None,
    time_limit_min: Annotated[
        int | None,
        typer.Option(help="Time limit of the driver's job, minutes; default: one day", min=1),
    ] = None,
    mem_mb: Annotated[
        int | None, typer.Option(help="Memory of the driver's job, MiB", min=1)
    ] = None,
    mail: Annotated[
        str | None, typer.Option(help="Address for Slurm's mail when the driver ends or fails")
    ] = None,
    dry_run: DryRun = False,
    source: DryRunInventory = None,
    redo: Redo = False,
    keep: Keep = False,
) -> None:
    """Check a run and submit its driver as a small Slurm job."""
    from pipeline.commands import driver_job
    from pipeline.resume import OnMismatch

    options = {
        "partition": partition,
        "time_limit_min": time_limit_min,
        "mem_mb": mem_mb,
        "mail": mail,
    }
    driver = {key: value for key, value in options.items() if value is not None}
    on_mismatch = OnMismatch.from_flags(redo=redo, keep=keep)
    if dry_run:
        lines = driver_job.write_dry_run(run_or_experiment, driver, source)
    else:
        _refuse_inventory(source)
        lines = driver_job.submit_run(run_or_experiment, driver, on_mismatch)
    typer.echo("\n".join(lines))


def _refuse_inventory(source: Path | None) -> None:
    """Refuse a saved inventory where jobs would be submitted.

    Raises:
        ConfigError: there is one.
    """
    if source is not None:
        raise ConfigError(f"--from {source}: only with --dry-run; jobs are submitted to a Slurm")


@app.command()
def stop(folder: RunFolder) -> None:
    """Stop the driver, pools and jobs of a run. They may be on any host."""
    from pipeline.commands.stop import stop_run

    for line in stop_run(folder) or ["no driver, pool or job of this run is active"]:
        typer.echo(line)
    typer.echo(f"continue with: rlinf resume {folder}, or rlinf submit {folder}")


@app.command()
def status(
    folder: RunFolder,
    watch: Annotated[bool, typer.Option(help="Refresh until the run is finished")] = False,
) -> None:
    """Show progress, metrics, time left, pools and jobs."""
    from pipeline.commands.status import show_status

    show_status(folder, watch=watch)


@app.command()
def scale(
    folder: RunFolder,
    target: Annotated[str, typer.Argument(help="rollout+2, rollout-1, rollout=4 or rollout=auto")],
) -> None:
    """Change the number of workers of an elastic pool. The run may be active or not."""
    from pipeline.pools.autoscaler import request_scale
    from pipeline.run import Run

    typer.echo(f"{request_scale(Run.open(folder), target)} workers requested")


@app.command()
def report(folder: RunFolder) -> None:
    """Write the report of a run, report/report.html."""
    from pipeline.metrics import rewrite_metrics
    from pipeline.report import write_report
    from pipeline.run import Run

    opened = Run.open(folder)
    rewrite_metrics(opened.folder)
    typer.echo(f"report: {write_report(opened.folder)}")


@app.command()
def data(
    run_or_experiment: RunOrOverrides,
    prompts: Annotated[int, typer.Option(min=0, help="Number of prompts of each set")] = 2,
) -> None:
    """Show columns of data files and the first rendered prompts."""
    from pipeline.commands.show_data import show_data

    show_data(run_or_experiment, prompts)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="A model folder, or a run directory")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides key=value, such as engine=vllm or gsm8k.temperature=0.6"),
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FILE: a protocol and its problems; may be repeated. NAME: one of robot tasks"
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="A file of rows with question and answer; may be repeated"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the evaluation; default: names of model and sets")
    ] = None,
    weights_version: Annotated[
        int | None,
        typer.Option("--version", help="Of a run: version of the weights; default: the best"),
    ] = None,
    episodes: Annotated[
        int | None, typer.Option(help="Robot tasks: run only this many episodes; a partial score")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Robot tasks: only compare the policy with the suite")
    ] = False,
    redo: Redo = False,
    keep: Keep = False,
) -> None:
    """Score a language model or a robot policy.

    A language model is scored on sets of problems, a robot policy on a suite of tasks.
    """
    from pipeline.commands.evaluate import PAGE, read_robot_suite, run_evaluation, show_result
    from pipeline.resume import OnMismatch

    on_mismatch = OnMismatch.from_flags(redo=redo, keep=keep)
    suites = suite or []
    if len(suites) == 1 and not data and read_robot_suite(suites[0]) is not None:
        from pipeline.commands.evaluate_robot import run_robot_evaluation, show_check

        if check:
            return show_check(model, suites[0], overrides or (), weights_version)
        folder, result = run_robot_evaluation(
            model, suites[0], overrides or (), name, weights_version, episodes, on_mismatch
        )
    elif check or episodes is not None:
        option = "--check" if check else "--episodes"
        raise ConfigError(f"{option}: is for one suite of robot tasks (--suite libero_spatial)")
    else:
        folder, result = run_evaluation(
            model, suites, data or (), overrides or (), name, weights_version, on_mismatch
        )
    show_result(result)
    typer.echo(f"page: {folder / PAGE}")


@app.command()
def serve(
    model: Annotated[Path, typer.Argument(help="A model folder, or a run directory")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides of engine and model, such as engine=vllm"),
    ] = None,
    weights_version: Annotated[
        int | None,
        typer.Option("--version", help="Of a run: version of the weights; default: the best"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in requests; default: that of the folder")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0: all network interfaces")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen at; 0: any free one", min=0, max=65535)
    ] = 8000,
) -> None:
    """Serve a language model with an OpenAI-compatible endpoint."""
    from pipeline.commands.serve import Address, serve_model

    serve_model(model, overrides or (), weights_version, name, Address(host, port))


@app.command()
def compare(
    left: Annotated[Path, typer.Argument(help="The run directory of an evaluation")],
    right: Annotated[Path, typer.Argument(help="Another one, of the same sets")],
) -> None:
    """Compare two evaluations, problem by problem."""
    from pipeline.commands.evaluate import show_comparison

    show_comparison(left, right)


@app.command()
def export(
    folder: RunFolder,
    target: Annotated[Path, typer.Argument(help="New folder for the model")],
    weights_version: Annotated[
        int | None, typer.Option("--version", help="Version of the weights; default: the newest")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The version with the best held-out score")
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with LoRA: only the adapters, for PEFT")
    ] = False,
) -> None:
    """Copy weights of a run to a model folder with a model card."""
    from pipeline.commands.export import export_adapter, export_weights
    from pipeline.commands.results import best_version

    if best and weights_version is not None:
        raise ConfigError("--best and --version exclude each other: use one of them")
    note = ""
    if best:
        weights_version, score = best_version(folder)
        note = f" (after iteration {weights_version}, the best held-out score: {score:.3g})"
    export = export_adapter if adapter else export_weights
    typer.echo(f"version {export(folder, target, weights_version)}{note} in {target}")


@app.command()
def demonstrations(
    source: Annotated[
        Path, typer.Argument(help="A LeRobot data set, or a folder of trajectories-*.h5")
    ],
    target: Annotated[Path, typer.Argument(help="New folder")],
    solved: Annotated[
        bool, typer.Option("--solved", help="From LeRobot: count every episode as solved")
    ] = False,
    fps: Annotated[int, typer.Option(min=1, help="To LeRobot: steps per second")] = 20,
    task: Annotated[str, typer.Option(help="To LeRobot: description of the task")] = "",
    png: Annotated[
        bool,
        typer.Option("--png", help="To LeRobot: store images as PNG, lossless, instead of videos"),
    ] = False,
    intervened: Annotated[
        bool,
        typer.Option(
            "--intervened", help="From trajectories: extract the episodes in which a person acted"
        ),
    ] = False,
) -> None:
    """Convert between LeRobot data sets and trajectories.

    A folder of trajectories can be used as algorithm.offline_data.
    """
    from pipeline.commands.results import convert_demonstrations, extract_interventions

    if intervened:
        typer.echo(extract_interventions(source, target))
    else:
        typer.echo(
            convert_demonstrations(source, target, fps=fps, task=task, png=png, solved=solved)
        )


@app.command("world-model")
def world_model(
    source: Annotated[Path, typer.Argument(help="A run with one camera in a real simulator")],
    file: Annotated[Path, typer.Argument(help="New file for the world model")],
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps")] = 3000,
    seed: Annotated[int, typer.Option(min=0, help="Random seed")] = 0,
    check: Annotated[
        bool,
        typer.Option("--check", help="Measure FILE on the newest evaluation of the run instead"),
    ] = False,
) -> None:
    """Fit a world model to the rollouts of a run.

    It is measured on held-out episodes. Train in it with task=world_model.
    """
    from pipeline.commands import world_model as command

    def report(step: int, losses: dict[str, float]) -> None:
        if step % 100 == 0 or step == steps:
            values = ", ".join(f"{name} {value:.4g}" for name, value in losses.items())
            typer.echo(f"step {step} of {steps}: {values}", err=True)

    if check:
        metrics = command.check(source, file)
    else:
        metrics = command.fit(source, file, steps=steps, seed=seed, report=report)
    for name, value in metrics.items():
        typer.echo(f"{name}: {value:.4g}")


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A .gguf file, an installed package that contains one, or a folder of OpenVLA "
            "with pickled weights"
        ),
    ],
    target: Annotated[Path, typer.Argument(help="New folder for the model")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with Llama 2's tokenizer, for a native (Prismatic) OpenVLA"),
    ] = None,
) -> None:
    """Convert a GGUF file or OpenVLA weights to a model folder.

    Set model.path to that folder.
    """
    if Path(source).is_dir():
        from rlinf.models.openvla_conversion import convert_openvla

        convert_openvla(Path(source), target, tokenizer)
    else:
        from rlinf.models.loading import convert_gguf

        if tokenizer is not None:
            raise ConfigError(f"--tokenizer {tokenizer}: {source} has its own; remove the option")
        convert_gguf(source, target)
    typer.echo(f"model folder: {target}")


@app.command()
def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="With --env: overrides task.KEY=VALUE. With --partition: experiment=NAME and "
            "overrides, whose engine is started and whose model is trained for one step"
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="Folder of the runs; must be visible on every node")
    ] = Path("runs"),
    env: Annotated[
        str | None,
        typer.Option(help="Check the requirements of the simulator of task=NAME instead"),
    ] = None,
    partition: Annotated[
        list[str] | None,
        typer.Option(help="Check this partition with a short job; may be repeated"),
    ] = None,
    site: Annotated[
        Path | None, typer.Option(help="With --partition: site file; default: cluster.site")
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="With --partition: time for all jobs, queue included", min=0.5)
    ] = 5.0,
) -> None:
    """Check this machine, or partitions with short jobs. Each finding has a remedy."""
    from pipeline.commands import doctor

    if env is not None and partition:
        raise ConfigError("--env and --partition exclude each other: use one of them")
    if overrides and env is None and not partition:
        raise ConfigError(
            f"{overrides[0]}: overrides need --env NAME, the task that they belong to, or "
            "--partition NAME, where the experiment is tried"
        )
    if site is not None and not partition:
        raise ConfigError(f"--site {site}: it needs --partition NAME, whose jobs get its settings")
    if partition:
        from pipeline.commands.partition_check import PartitionOptions, check_partitions

        options = PartitionOptions(
            tuple(partition), folder, site, minutes, words=tuple(overrides or ())
        )
        # The partitions first: a wrong name ends the command before anything is checked.
        findings = check_partitions(options)
        findings = [*doctor.check_machine(folder), *findings]
    elif env is not None:
        findings = list(doctor.check_simulator(env, overrides or ()))
    else:
        findings = list(doctor.check_machine(folder))
    raise typer.Exit(doctor.show_findings(findings))


@app.command()
def inventory(
    save: Annotated[
        Path | None, typer.Option(help="Save the inventory to this file, as JSON")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Read a saved inventory instead of querying Slurm")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
    site: Annotated[
        Path | None, typer.Option(help="Site file with the hardware of the partitions")
    ] = None,
) -> None:
    """Show partitions with GPUs, free nodes, limits and load."""
    from pipeline.inventory import show_inventory

    show_inventory(source, save, site, as_json=as_json)


@app.command("init-site")
def init_site(
    source: Annotated[
        Path | None, typer.Option("--from", help="Read a saved inventory instead of querying Slurm")
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write")] = Path("site.yaml"),
) -> None:
    """Ask Slurm about the cluster and write a site file."""
    from pipeline.commands import init_site as command

    typer.echo("\n".join(command.init_site(source, out)))


@app.command()
def plan(
    run_or_experiment: RunOrOverrides,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Output of rlinf profile; default: profile.json if it exists, else data sheets"
        ),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Read a saved inventory instead of querying Slurm")
    ] = None,
    site: Annotated[Path | None, typer.Option(help="Site file; default: cluster.site")] = None,
    partition: Annotated[
        list[str] | None, typer.Option(help="Use only this partition; may be repeated")
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="time, gpu-hours, money or time-to-end (includes queueing and preemption)"
        ),
    ] = "time",
    pin: Annotated[
        list[str] | None,
        typer.Option(
            help="Fix the device of a stage: STAGE=KIND, such as train=h100; may be repeated"
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help="Assume a number of devices: KIND=NUMBER; may be repeated"),
    ] = None,
    execution: Annotated[
        ExecutionMode | None,
        typer.Option(
            help="pools: resident workers for many iterations; jobs: one Slurm job per stage; "
            "default: pools, or jobs if they are predicted to be faster"
        ),
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Evaluate this plan instead of searching for one")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The file to write; the HTML page is written beside it")
    ] = Path("plan.yaml"),
) -> None:
    """Choose where each stage runs. Writes plan.yaml, and plan.html with the reasons."""
    from pipeline.commands.experiment import load_configuration
    from pipeline.planning.planner.plan_command import run_plan

    default_profile = Path("profile.json")
    profile_file = profile or (default_profile if default_profile.exists() else None)
    sources = planning_sources(profile_file, source, site, partition, pin)
    config = load_configuration(run_or_experiment)
    run_plan(
        config,
        sources,
        out,
        objective,
        what_if or (),
        check,
        execution.value if execution else None,
    )


@app.command()
def clean(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Run directories to clean, besides the shared memory of this node"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be removed")
    ] = False,
) -> None:
    """Remove leftover files of killed processes.

    These are shared memory of this node and temporary files of runs.
    """
    from pipeline.cleanup import clean_up

    for line in clean_up(folders or [], dry_run=dry_run):
        typer.echo(line)


@app.command()
def replan(
    folder: RunFolder,
    profile: Annotated[
        Path | None, typer.Option(help="Use this profile instead of that of the run's plan")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="With --profile: a saved inventory")
    ] = None,
    site: Annotated[Path | None, typer.Option(help="With --profile: a site file")] = None,
    objective: Annotated[
        str | None, typer.Option(help="Objective; default: that of the run's plan")
    ] = None,
    apply: Annotated[bool, typer.Option(help="Replace the plan of the run")] = False,
) -> None:
    """Compare a plan with measured times, and plan again."""
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
    """Return the ``PlanningSources`` of a command line, with absolute paths."""
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
    run_or_experiment: RunOrOverrides,
    partition: Annotated[
        list[str] | None,
        typer.Option(help="Measure on this partition; may be repeated; default: those of the plan"),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time for all measurements", min=0.1)] = 10.0,
    processes: Annotated[
        int | None,
        typer.Option(help="Maximum number of processes per node; default: one per GPU", min=1),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore earlier measurements")] = False,
    out: Annotated[Path, typer.Option(help="The file to write")] = Path("profile.json"),
) -> None:
    """Measure time and memory of each stage on each device."""
    import logging

    from pipeline.commands.experiment import open_run, run_sft
    from pipeline.planning.profile.profile_pass import ProfileOptions, profile_run

    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("rlinf").setLevel(logging.INFO)
    options = ProfileOptions(tuple(partition or ()), minutes, processes, fresh)
    profile_run(open_run(run_or_experiment), options, run_sft).save(out)
    typer.echo(f"profile: {out}")


@app.command()
def simulate(
    problem: Annotated[
        Path, typer.Argument(help="A problem file (YAML), such as plan.problem.yaml of rlinf plan")
    ],
    plan: Annotated[
        Path | None, typer.Option(help="A plan with pools; default: the best plan of the planner")
    ] = None,
    scenario: Annotated[Path | None, typer.Option(help="A file of disturbances (YAML)")] = None,
    iterations: Annotated[int, typer.Option(help="Iterations to simulate", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Random seed", min=0)] = 0,
) -> None:
    """Simulate a placement with stragglers, queues and losses."""
    from pipeline.planning.simulator.simulate_command import run_simulate

    run_simulate(problem, plan, scenario, iterations, seed)


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
