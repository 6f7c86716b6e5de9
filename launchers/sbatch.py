"""Batch scripts of jobs, and their submission with one call of sbatch.

A script holds everything that a job needs: sbatch's options, the lines of the site file, and for
each process the call of its module (:mod:`launchers.job_entrypoint`). Jobs that differ only in
their calls are an array, and jobs that start together are one heterogeneous job.
"""

from __future__ import annotations

import secrets
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from launchers.job_entrypoint import ModuleCall
from launchers.launcher import JobSpec
from rlinf import process_tuning
from rlinf.errors import EXIT_REQUEUE, PlanError, SlurmError, SlurmUnresponsiveError
from rlinf.package_paths import child_python_path
from slurm.client import SlurmClient, classify_failure, run_command
from slurm.jobs import HET_GROUPS_VARIABLE, JobResources, parent_job_id
from slurm.records import UnreadableSubmission, parse_submitted_id
from slurm.sbatch_options import check_log_folder, sbatch_options, srun_options
from slurm.stop_signals import STOP_MARGIN_VARIABLE

SIGNAL_EARLY_S = 30
"""Seconds by which Slurm may send a signal too early, because it rarely checks the time of jobs
(measured on 22.05; up to 60 according to sbatch's manual page)."""
_WAIT_CODE = """
code=0
for _ in $(seq {count}); do
  wait -n && continue
  code=$?
  # A process that stops for a requeue ends with this code, and the others will too.
  if [ $code != {stopped} ]; then
    # The others get time to write a checkpoint, for example; their driver may end them sooner.
    others=$(jobs -p)
    ( sleep {patience_s}; kill $others ) 2> /dev/null &
    timer=$!
    wait $others
    kill $timer
    break
  fi
done
wait
exit $code
"""
"""Shell code that waits for the steps of a heterogeneous job. A failed step ends the others."""
_RESTART_CODE = """
code=$?
# Killed by a signal, for example for lack of memory. After many quick kills it is not restarted.
if [ $code -gt 128 ] && [ $SECONDS -ge {long_s} -o "${{SLURM_RESTART_COUNT:-0}}" -lt {times} ]; then
  {requeue} && sleep 60
fi
exit $code
"""
"""Shell code after the process of a restarting job: requeues the job if a signal killed it."""
TAG_PREFIX = "rlinf-"
"""Prefix of tags. The tag in the comment of jobs identifies one submission."""
HEALTHY_RUN_S, MAX_QUICK_RESTARTS = 600, 10
"""A killed job is requeued if it ran for ``HEALTHY_RUN_S`` or was restarted fewer than
``MAX_QUICK_RESTARTS`` times."""


def submit_jobs(jobs: Sequence[JobSpec], tag: str) -> list[str]:
    """Submit jobs that differ only in arguments and outputs. Returns their ids.

    Several jobs become one job array; a single one does not.

    Args:
        tag: a :func:`new_tag`, which is added to the comment of the jobs. So they can be found
            without their ids.

    Raises:
        PlanError: text of a job does not fit into a batch script; nothing was submitted.
        SlurmUnresponsiveError: Slurm does not answer; the job may exist or not.
        SlurmError: the job was refused, with Slurm's message; or the answer contains no readable
            id, and the job was cancelled.
    """
    job_id = _submit(array_script, jobs, tag)
    return [job_id] if len(jobs) == 1 else [f"{job_id}_{number}" for number in range(len(jobs))]


def submit_hetjob(jobs: Sequence[JobSpec], tag: str) -> list[str]:
    """Submit jobs that start at the same moment, as one heterogeneous job. Returns their ids.

    A job has one or more components, each with its own resources and ranks. If one job fails, the
    others end too, and Slurm reports all jobs as failed.

    Args:
        tag: as for :func:`submit_jobs`.

    Raises:
        SlurmUnresponsiveError, SlurmError: as :func:`submit_jobs`.
    """
    het_job_id = _submit(hetjob_script, jobs, tag)
    return [f"{het_job_id}+{number}" for number in _first_components(jobs)]


def submit_restarting(job: JobSpec, tag: str) -> str:
    """Submit a job of one process that is requeued if a signal kills it. Returns its id.

    Args:
        tag: as for :func:`submit_jobs`.

    Raises:
        SlurmUnresponsiveError, SlurmError: as :func:`submit_jobs`.
    """
    return _submit(lambda jobs: restarting_script(jobs[0]), [job], tag)


def _submit(
    write_script: Callable[[Sequence[JobSpec]], str], jobs: Sequence[JobSpec], tag: str
) -> str:
    _create_folders(jobs)
    script = write_script([_with_tag(job, tag) for job in jobs])
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script)
        file.flush()
        try:
            answer = run_command(("sbatch", "--parsable", file.name))
        except SlurmError as error:
            raise _submission_error(" and ".join(job.name for job in jobs), error) from None
    try:
        return parse_submitted_id(answer, lambda: SlurmClient().find_by_comment(tag))
    except UnreadableSubmission as error:
        raise _cancel_unreadable(" and ".join(job.name for job in jobs), tag, error) from None


def check_submission(script: Path) -> str:
    """Return sbatch's answer to a batch script that it only tests (``--test-only``).

    Raises:
        SlurmUnresponsiveError: Slurm does not answer.
        SlurmError: sbatch would refuse the script; the message is Slurm's.
    """
    try:
        answer = run_command(("sbatch", "--test-only", str(script)), return_stderr=True)
    except SlurmUnresponsiveError:
        raise
    except SlurmError as error:
        raise SlurmError(_slurm_message(error)) from None
    lines = [line for line in answer.splitlines() if line.startswith("sbatch: ")]
    return "; ".join(line.removeprefix("sbatch: ") for line in lines) or answer.strip()


def new_tag() -> str:
    """Return a unique tag for the comment of the jobs of one submission."""
    return f"{TAG_PREFIX}{secrets.token_hex(8)}"


def _with_tag(job: JobSpec, tag: str) -> JobSpec:
    """Return the job with a tag in its comment."""

    def with_comment(part: JobResources) -> JobResources:
        comment = f"{part.sbatch.get('comment', '')} {tag}".strip()
        return replace(part, sbatch={**part.sbatch, "comment": comment})

    extra_components = tuple(with_comment(part) for part in job.extra_components)
    return replace(job, resources=with_comment(job.resources), extra_components=extra_components)


def _cancel_unreadable(name: str, tag: str, error: UnreadableSubmission) -> SlurmError:
    """Cancel the jobs of a submission without a readable id. Returns the error to raise."""
    advice = "let sbatch print 'Submitted batch job ID', as Slurm's own does"
    client = SlurmClient()
    try:
        job_ids = {parent_job_id(job_id) for job_id in client.find_by_comment(tag)}
        client.cancel(job_ids)
    except SlurmUnresponsiveError as no_answer:
        return SlurmUnresponsiveError(f"{name}: {error}; {no_answer}")
    except SlurmError as refusal:
        return SlurmError(f"{name}: {error}; it was not cancelled either: {refusal}; {advice}")
    state = (
        f"job {', '.join(sorted(job_ids))} was cancelled" if job_ids else "no such job is queued"
    )
    return SlurmError(f"{name}: {error}; {state}; {advice}")


def batch_script(jobs: Sequence[JobSpec]) -> str:
    """Return the batch script of one job, or of several that start together."""
    if len(jobs) > 1 or jobs[0].extra_components:
        return hetjob_script(jobs)
    return array_script(jobs)


def array_script(jobs: Sequence[JobSpec]) -> str:
    """Return the batch script of one job, or of an array with an element for each job."""
    first, resources = jobs[0], jobs[0].resources
    job_id = "%j" if len(jobs) == 1 else "%A_%a"
    # Slurm's own messages about the job, such as a kill, follow the output of the first process.
    options = {
        **_options(first.name, resources, allow_requeue=first.allow_requeue),
        "output": str(first.log_dir / f"{job_id}_0_log.out"),
        "error": str(first.log_dir / f"{job_id}_0_log.err"),
    }
    calls = [shlex.quote(_module_call(job).to_json()) for job in jobs]
    lines = _setup_lines(resources)
    if len(jobs) > 1:
        parallelism = resources.array_parallelism or len(jobs)
        options["array"] = f"0-{len(jobs) - 1}%{min(parallelism, len(jobs))}"
        lines += ["calls=(", *calls, ")"]
        calls = ['"${calls[$SLURM_ARRAY_TASK_ID]}"']
    log = shlex.quote(str(first.log_dir / f"{job_id}_%t_log"))
    step = [shlex.join(srun_options(resources)), *_python_call(resources), calls[0]]
    srun = f"srun --unbuffered --output {log}.out --error {log}.err {' '.join(step)}"
    return "\n".join(["#!/bin/bash", *_directives(options), "", *lines, srun, ""])


def restarting_script(job: JobSpec) -> str:
    """Return the batch script of :func:`submit_restarting`."""
    return array_script([job]) + _RESTART_CODE.format(
        long_s=HEALTHY_RUN_S,
        times=MAX_QUICK_RESTARTS,
        # Outside of a container, which may lack scontrol.
        requeue=shlex.join([job.resources.interpreter or sys.executable, "-m", "slurm.requeue"]),
    ).lstrip("\n")


def hetjob_script(jobs: Sequence[JobSpec]) -> str:
    """Return the batch script of a heterogeneous job: options by component, then an srun per job.

    The script runs on the first node of the first component; the job ends when the script ends.
    """
    directives, srun_commands = [], []
    for first, job in zip(_first_components(jobs), jobs, strict=True):
        log = f'{shlex.quote(str(job.log_dir))}/"$SLURM_JOB_ID"+{first}_%t_log'
        steps = []
        groups = ",".join(str(first + i) for i in range(len(job.components)))
        for number, resources in enumerate(job.components, first):
            output = str(job.log_dir / "%j_batch.log")
            options = _component_options(job.name, resources, allow_requeue=job.allow_requeue)
            directives.append(_directives({**options, "output": output}))
            call = [*_python_call(resources), shlex.quote(_module_call(job).to_json())]
            lines = [
                *_setup_lines(resources),
                f"export {HET_GROUPS_VARIABLE}={groups}",
                f"exec {' '.join(call)}",
            ]
            words = ["bash", "-c", "\n".join(lines)]
            step = shlex.join([f"--het-group={number}", *srun_options(resources), *words])
            steps.append(f"--unbuffered --output {log}.out --error {log}.err {step}")
        srun_commands.append(f"srun {' : '.join(steps)} &")
    header = "\n#SBATCH hetjob\n".join("\n".join(lines) for lines in directives)
    body = "\n".join(srun_commands)
    patience_s = max(job.resources.signal_delay_s for job in jobs)
    wait_code = _WAIT_CODE.format(count=len(jobs), stopped=EXIT_REQUEUE, patience_s=patience_s)
    return f"#!/bin/bash\n{header}\n\n{body}\n{wait_code}"


def check_hetjob_options(components: Sequence[tuple[str, JobResources]]) -> None:
    """Check that no component of a heterogeneous job inherits options of an earlier one.

    A component inherits most options that it does not set from the component before (measured on
    22.05: time, memory, excluded nodes, nice).

    Args:
        components: the plan's key and the resources of each component.

    Raises:
        PlanError: a component sets an option that a later one does not set.
    """
    key_by_option: dict[str, str] = {}
    for key, resources in components:
        options = _component_options(key, resources)
        for option, earlier_key in key_by_option.items():
            if option not in options:
                raise PlanError(
                    f"plan: {earlier_key} and {key} are one heterogeneous job, where the first "
                    f"one's --{option} of sbatch would apply to the other too: set it for both, in "
                    "the plan or the site file"
                )
        key_by_option |= {option: key for option in options if option not in key_by_option}


def _first_components(jobs: Sequence[JobSpec]) -> list[int]:
    """Return the number of each job's first component."""
    return [0, *accumulate(len(job.components) for job in jobs[:-1])]


def _options(name: str, resources: JobResources, *, allow_requeue: bool = True) -> dict[str, Any]:
    """Return sbatch's options of a job."""
    warning_s = _warning_s(resources)
    return sbatch_options(name, resources, allow_requeue=allow_requeue, warning_s=warning_s)


def _component_options(name: str, resources: JobResources, **further: Any) -> dict[str, Any]:
    """Return sbatch's options of a component of a heterogeneous job."""
    # Without this, a component without GPUs would inherit those of an earlier component.
    return {"gres": "none", **_options(name, resources, **further)}


def _directives(options: Mapping[str, Any]) -> list[str]:
    """Return options as ``#SBATCH`` lines."""
    return [
        f"#SBATCH --{name}" + (f"={shlex.quote(str(value))}" * (value is not True))
        for name, value in sorted(options.items())
    ]


def _setup_lines(resources: JobResources) -> list[str]:
    """Return the shell lines before a job's processes: variables, then those of the site file."""
    variables = {
        **process_tuning.child_environment(),
        "PYTHONPATH": child_python_path(),
        STOP_MARGIN_VARIABLE: str(_warning_s(resources)),
        **resources.env,
    }
    exports = [f"export {key}={shlex.quote(value)}" for key, value in sorted(variables.items())]
    return [*exports, *resources.setup]


def _warning_s(resources: JobResources) -> int:
    """Return the seconds between the warning signal and the end of a job."""
    if resources.time_limit_min is None:
        return resources.signal_delay_s
    # Leave a short job half of its time; a signal before Python has started would kill it.
    return min(resources.signal_delay_s, (60 * resources.time_limit_min - SIGNAL_EARLY_S) // 2)


def _create_folders(jobs: Sequence[JobSpec]) -> None:
    """Create the folders of jobs.

    Raises:
        PlanError: jobs could not write their logs there.
    """
    for job in jobs:
        check_log_folder(job.log_dir)
        job.log_dir.mkdir(parents=True, exist_ok=True)
        job.output_dir.mkdir(parents=True, exist_ok=True)


def _python(resources: JobResources) -> str:
    """Return the shell command of Python on the nodes."""
    # A container's command includes its Python; other jobs use the interpreter of this process.
    interpreter = resources.interpreter or (None if resources.python_command else sys.executable)
    interpreter_words = () if interpreter is None else (interpreter,)
    return shlex.join([*resources.command_prefix, *interpreter_words])


def _python_call(resources: JobResources) -> list[str]:
    """Return the shell words that start a process, to be followed by the call of its module."""
    return [_python(resources), "-u", "-m", "launchers.job_entrypoint"]


def _module_call(job: JobSpec) -> ModuleCall:
    speeds = job.resources.speed_weights or ()
    pairs = tuple(speeds.items() if isinstance(speeds, Mapping) else (("", s) for s in speeds))
    return ModuleCall(job.module, job.argv, str(job.log_dir), pairs, job.allow_requeue)


def _submission_error(name: str, error: Exception) -> SlurmError:
    cause = _slurm_message(error)
    cls = type(error) if isinstance(error, SlurmUnresponsiveError) else classify_failure(cause)
    outcome = "was not answered" if cls is SlurmUnresponsiveError else "refused the job"
    return cls(f"{name}: sbatch {outcome}: {cause}")


def _slurm_message(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if "sbatch: error" in line]
    return "; ".join(line.split("sbatch: error:")[-1].strip() for line in lines) or str(error)
