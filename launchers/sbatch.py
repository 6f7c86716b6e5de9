"""Submission: jobs as one call of sbatch, by way of submitit.

submitit writes the batch script, pickles what to call, and starts it on the nodes. It knows no
heterogeneous jobs; their script is written here, from the same options.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from launchers.job_entrypoint import ModuleCall
from launchers.launcher import JobSpec
from rlinf import process_tuning
from rlinf.errors import EXIT_REQUEUE, PlanError, SlurmError, SlurmUnresponsiveError
from rlinf.package_paths import child_python_path
from slurm.client import (
    CONTROLLER_ENV,
    SLURM_ENV_PREFIXES,
    SlurmClient,
    UnreadableSubmission,
    block_stop_signals,
    classify_failure,
    parse_submitted_id,
    run_command,
)
from slurm.jobs import HET_GROUPS_VARIABLE, JobResources, parent_job_id
from slurm.sbatch_options import (
    check_log_folder,
    check_script_options,
    sbatch_options,
    srun_options,
)
from slurm.stop_signals import STOP_MARGIN_VARIABLE

SIGNAL_EARLY_S = 30
"""Slurm looks at the time of jobs so rarely, and sends a signal that much too early (measured on
22.05; the manual page of sbatch says up to 60)."""
_UNTIL_ONE_FAILS = """
code=0
for _ in $(seq {count}); do
  wait -n && continue
  code=$?
  # What was asked to stop has said so by this code; so will the others, in their own time.
  if [ $code != {stopped} ]; then
    # Time for what the others write, a checkpoint say; their driver ends them sooner.
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


_AGAIN = """
code=$?
# Killed by a signal, for want of memory say. One that is killed time and again is given up.
if [ $code -gt 128 ] && [ $SECONDS -ge {long_s} -o "${{SLURM_RESTART_COUNT:-0}}" -lt {times} ]; then
  {requeue} && sleep 60
fi
exit $code
"""
_NO_OPTIONS = frozenset({"setup", "teardown", "srun_args", "additional_parameters"})
"""submitit's keywords that do not become a line for sbatch each."""
TAG_PREFIX = "rlinf-"
"""Begins a word in the comment of jobs by which one submission is told from all others."""
HEALTHY_RUN_S, MAX_QUICK_RESTARTS = 600, 10
"""A killed job is started again if it ran for so long, or was not started that often."""


def submit_jobs(jobs: Sequence[JobSpec]) -> list[str]:
    """Submit jobs that differ in their arguments and outputs only; returns their ids.

    Several become one job array, a single one does not.

    Raises:
        PlanError: text of a job does not fit into a batch script; nothing was submitted.
        SlurmUnresponsiveError: no answer; the job may be there or not.
        SlurmError: it was refused, with Slurm's message; or its id cannot be read from the answer,
            and it was cancelled.
    """
    from submitit.core.utils import FailedJobError

    first, needs = jobs[0], jobs[0].resources
    _make_folders(jobs)
    executor = patched_slurm_executor()(folder=first.log_dir, python=_python(needs))
    at_once = {"array_parallelism": len(jobs)}
    executor.update_parameters(
        **at_once | submitit_parameters(first.name, needs, allow_requeue=first.allow_requeue)
    )
    try:
        with login_environment(), executor.batch():
            submitted = [executor.submit(_call(job)) for job in jobs]
        return [str(entry.job_id) for entry in submitted]
    except FailedJobError as error:
        raise _failed(first.name, error) from None


def submit_hetjob(jobs: Sequence[JobSpec]) -> list[str]:
    """Submit jobs that start at the same moment, as one heterogeneous job; returns their ids.

    Each is a component of it, or several, with its own resources and ranks. When one fails the
    others end too, and Slurm calls all of them failed.

    Raises:
        SlurmUnresponsiveError, SlurmError: as :func:`sbatch`.
    """
    leader = _submit(hetjob_script(jobs), jobs)
    return [f"{leader}+{number}" for number in _firsts(jobs)]


def submit_restarting(job: JobSpec) -> str:
    """Submit a job of one process that is started again when it was killed, too; returns its id.

    Raises:
        SlurmUnresponsiveError, SlurmError: as :func:`sbatch`.
    """
    return _submit(restarting_script(job), [job])


def _submit(script: str, jobs: Sequence[JobSpec]) -> str:
    _make_folders(jobs)
    mark = _mark_in(jobs[0].resources.sbatch.get("comment"))
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script)
        file.flush()
        try:
            with login_environment():
                answer = run_command(("sbatch", "--parsable", file.name))
        except SlurmError as error:
            raise _failed(" and ".join(job.name for job in jobs), error) from None
    try:
        return parse_submitted_id(answer, lambda: _queued(mark))
    except UnreadableSubmission as error:
        raise _withdrawn(" and ".join(job.name for job in jobs), mark, error) from None


def new_tag() -> str:
    """Return a word that no other submission has in the comment of its jobs."""
    return f"{TAG_PREFIX}{secrets.token_hex(8)}"


def with_tag(job: JobSpec, mark: str) -> JobSpec:
    """Return the job with a mark in its comment, by which it is found without its id."""

    def with_mark(part: JobResources) -> JobResources:
        comment = f"{part.sbatch.get('comment', '')} {mark}".strip()
        return replace(part, sbatch={**part.sbatch, "comment": comment})

    further = tuple(with_mark(part) for part in job.extra_components)
    return replace(job, resources=with_mark(job.resources), extra_components=further)


def _mark_in(comment: object) -> str | None:
    """Return the mark in the comment of a job; None: it has none."""
    found = re.search(rf"(?<!\S){TAG_PREFIX}[0-9a-f]{{16}}$", str(comment or ""))
    return None if found is None else found[0]


def _queued(mark: str | None) -> list[str]:
    """Return the ids of jobs in the queue that have a mark."""
    return [] if mark is None else SlurmClient().find_by_comment(mark)


def _withdrawn(name: str, mark: str | None, error: UnreadableSubmission) -> SlurmError:
    """Cancel jobs whose id could not be read; returns the error that says so."""
    advice = "let sbatch print 'Submitted batch job ID', as Slurm's own does"
    if mark is None:
        left = "the job has no mark to look for it by and may be queued: see squeue --me"
        return SlurmError(f"{name}: {error}; {left}; {advice}")
    try:
        found = {parent_job_id(identity) for identity in _queued(mark)}
        SlurmClient().cancel(found)
    except SlurmUnresponsiveError as silence:
        return SlurmUnresponsiveError(f"{name}: {error}; {silence}")
    except SlurmError as refusal:
        return SlurmError(f"{name}: {error}; it was not cancelled either: {refusal}; {advice}")
    left = f"job {', '.join(sorted(found))} was cancelled" if found else "no such job is queued"
    return SlurmError(f"{name}: {error}; {left}; {advice}")


@functools.cache
def patched_slurm_executor() -> type[Any]:
    """Return submitit's executor for Slurm, which reads sbatch's answers and writes srun as we do.

    It takes the place of submitit's own class, of which submitit makes its arrays and Hydra its
    sweeps (``hydra/launcher=submitit_slurm``).
    """
    from submitit.core import plugins
    from submitit.slurm import slurm

    class SlurmExecutor(slurm.SlurmExecutor):
        """See :func:`patched_slurm_executor`."""

        _mark: str | None = None
        """Of the submission that is made."""

        def _submit_command(self, command: str) -> Any:
            self._mark = _mark_in(_comment(self.parameters)) or new_tag()
            try:
                with login_environment():
                    return super()._submit_command(command)
            except UnreadableSubmission as error:
                name = self.parameters.get("job_name", "submitit")
                raise _withdrawn(name, self._mark, error) from None

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            check_script_options({"submitit_folder": self.folder}, "hydra.launcher")
            wanted = _of_sweep(self.parameters, self._mark)
            return str(slurm._make_sbatch_string(command=command, folder=self.folder, **wanted))

        # submitit calls it on the executor, whose mark is needed here.
        def _get_job_id_from_submission_command(  # type: ignore[override]
            self, string: str | bytes
        ) -> str:
            answer = string if isinstance(string, str) else string.decode()
            return parse_submitted_id(answer, lambda: _queued(self._mark))

    setattr(slurm, "SlurmExecutor", SlurmExecutor)  # noqa: B010 (to mypy it is a type)
    plugins._get_plugins.cache_clear()
    plugins.get_executors.cache_clear()
    return SlurmExecutor


def _comment(given: Mapping[str, Any]) -> str:
    """Return the comment of a job in submitit's keywords."""
    further = given.get("additional_parameters") or {}
    return str(further.get("comment", given.get("comment")) or "")


def _of_sweep(given: Mapping[str, Any], mark: str | None) -> dict[str, Any]:
    """Return submitit's keywords with what a sweep's leave out, which are written by hand.

    Args:
        mark: see :func:`new_tag`; None: the script is not submitted.

    Raises:
        PlanError: several of them say how much memory a job has, or one does not fit into its line
            of the script.
    """
    further = given.get("additional_parameters") or {}
    check_script_options({k: v for k, v in given.items() if k not in _NO_OPTIONS}, "hydra.launcher")
    check_script_options(further, "hydra.launcher.additional_parameters")
    memory = [key for key in ("mem", "mem_per_cpu", "mem_per_gpu") if given.get(key) is not None]
    if len(memory) > 1:
        raise PlanError(f"hydra.launcher: {' and '.join(memory)} exclude each other; leave one")
    step = list(given.get("srun_args") or ())
    needs = JobResources(cpus_per_task=given.get("cpus_per_task") or 1)
    named = {word.partition("=")[0] for word in step}
    step += [word for word in srun_options(needs) if word.partition("=")[0] not in named]
    if mark is not None and mark != _mark_in(_comment(given)):
        further = {**further, "comment": f"{_comment(given)} {mark}".strip()}
    return {"wckey": None, **given, "srun_args": step, "additional_parameters": further}


def batch_script(jobs: Sequence[JobSpec]) -> str:
    """The batch script by which one job, or several that start together, would be submitted."""
    first = jobs[0]
    if len(jobs) > 1 or first.extra_components:
        return hetjob_script(jobs)
    executor = patched_slurm_executor()(folder=first.log_dir, python=_python(first.resources))
    executor.update_parameters(
        **submitit_parameters(first.name, first.resources, allow_requeue=first.allow_requeue)
    )
    return str(executor._make_submission_file_text(executor._submitit_command_str, "call"))


def restarting_script(job: JobSpec) -> str:
    """The batch script of :func:`submit_restarting`."""
    needs = job.resources
    wanted = submitit_parameters(job.name, needs, allow_requeue=job.allow_requeue)
    wanted["additional_parameters"]["output"] = str(job.log_dir / "%j_batch.log")
    log = shlex.quote(str(job.log_dir / "%j_%t_log"))
    python = _python(needs)
    call = [
        *wanted["srun_args"],
        python,
        "-u -m launchers.job_entrypoint",
        shlex.quote(_call(job).to_json()),
    ]
    start = f"srun --unbuffered --output {log}.out --error {log}.err {' '.join(call)}"
    again = _AGAIN.format(
        long_s=HEALTHY_RUN_S, times=MAX_QUICK_RESTARTS, requeue=f"{python} -m slurm.requeue"
    )
    head = [*_flags(wanted), "", *wanted["setup"]]
    return "\n".join(["#!/bin/bash", *head, start]) + again


def hetjob_script(jobs: Sequence[JobSpec]) -> str:
    """The batch script of a heterogeneous job: the options of each component, then an srun a job.

    It runs on the first node of the first component, and the job ends with it.
    """
    options, starts = [], []
    for first, job in zip(_firsts(jobs), jobs, strict=True):
        log = f'{shlex.quote(str(job.log_dir))}/"$SLURM_JOB_ID"+{first}_%t_log'
        steps = []
        groups = ",".join(str(first + i) for i in range(len(job.components)))
        for number, needs in enumerate(job.components, first):
            wanted = submitit_parameters(job.name, needs, allow_requeue=job.allow_requeue)
            wanted["additional_parameters"]["output"] = str(job.log_dir / "%j_batch.log")
            options.append(_flags(wanted))
            call = [
                _python(needs),
                "-u",
                "-m",
                "launchers.job_entrypoint",
                shlex.quote(_call(job).to_json()),
            ]
            lines = [
                *wanted["setup"],
                f"export {HET_GROUPS_VARIABLE}={groups}",
                f"exec {' '.join(call)}",
            ]
            step = [f"--het-group={number}", *wanted["srun_args"], "bash", "-c", "\n".join(lines)]
            steps.append(f"--unbuffered --output {log}.out --error {log}.err {shlex.join(step)}")
        starts.append(f"srun {' : '.join(steps)} &")
    header = "\n#SBATCH hetjob\n".join("\n".join(lines) for lines in options)
    body = "\n".join(starts)
    patience_s = max(job.resources.signal_delay_s for job in jobs)
    end = _UNTIL_ONE_FAILS.format(count=len(jobs), stopped=EXIT_REQUEUE, patience_s=patience_s)
    return f"#!/bin/bash\n{header}\n\n{body}\n{end}"


def check_hetjob_options(components: Sequence[tuple[str, JobResources]]) -> None:
    """See that components of a heterogeneous job can have what each asks for, and no more.

    A component takes over most of what the one before it says and it does not (measured on 22.05:
    time, memory, excluded nodes, nice).

    Args:
        components: with the key of the plan that each is from.

    Raises:
        PlanError: an option is given for one and not for a later one.
    """
    first_keys: dict[str, str] = {}
    for key, needs in components:
        own = _options(submitit_parameters(key, needs))
        for option, before in first_keys.items():
            if option not in own:
                raise PlanError(
                    f"plan: {before} and {key} are one heterogeneous job, where the first one's "
                    f"--{option} of sbatch would hold for the other too: say it for both, in the "
                    "plan or the site file"
                )
        first_keys |= {option: key for option in own if option not in first_keys}


def _firsts(jobs: Sequence[JobSpec]) -> list[int]:
    """The number of each job's first component."""
    return [0, *accumulate(len(job.components) for job in jobs[:-1])]


def _options(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """sbatch's options for what :func:`parameters` gives, by name."""
    values = {
        "gres": "none",
        "job-name": wanted["job_name"],
        "time": wanted["time"],
        **wanted["additional_parameters"],
    }
    return {key: value for key, value in values.items() if value is not None}


def _flags(wanted: Mapping[str, Any]) -> list[str]:
    """The options as lines of a batch script, as submitit writes them."""
    return [
        f"#SBATCH --{name}" + (f"={shlex.quote(str(value))}" * (value is not True))
        for name, value in sorted(_options(wanted).items())
    ]


def _make_folders(jobs: Sequence[JobSpec]) -> None:
    """Make the folders of jobs.

    Raises:
        PlanError: jobs could not write their logs there.
    """
    for job in jobs:
        check_log_folder(job.log_dir)
        job.log_dir.mkdir(parents=True, exist_ok=True)
        job.output_dir.mkdir(parents=True, exist_ok=True)


def _python(needs: JobResources) -> str:
    """The command of Python on the nodes, for a shell."""
    # A container's command names its own; all others use this one.
    named = needs.interpreter or (None if needs.python_command else sys.executable)
    own = () if named is None else (named,)
    return shlex.join([*needs.command_prefix, *own])


def _call(job: JobSpec) -> ModuleCall:
    shares = job.resources.speed_weights or ()
    pairs = tuple(shares.items() if isinstance(shares, Mapping) else (("", s) for s in shares))
    path = tuple(child_python_path().split(os.pathsep))
    return ModuleCall(job.module, job.argv, path, str(job.log_dir), pairs, job.allow_requeue)


@contextlib.contextmanager
def login_environment() -> Iterator[None]:
    """Submit as from a login node: what is set here by a job, or for sbatch, changes no other job.

    sbatch hands its environment on to the job, so this holds for the job's srun, too.
    """
    from submitit.helpers import clean_env

    foreign = [name for name in os.environ if name.startswith(SLURM_ENV_PREFIXES)]
    kept = {name: value for name, value in os.environ.items() if name in CONTROLLER_ENV}
    with clean_env(foreign), block_stop_signals():
        os.environ.update(kept)
        yield


def submitit_parameters(
    name: str, needs: JobResources, *, allow_requeue: bool = True
) -> dict[str, Any]:
    """submitit's keywords for what a job asks for.

    Options of sbatch are its ``additional_parameters``, by their names
    (:func:`slurm.sbatch_options.sbatch_options`), but for the job's name and time.

    Args:
        requeues: whether Slurm starts it again itself after preemption or the loss of a node.
    """
    delay_s = needs.signal_delay_s
    if needs.time_limit_min is not None:
        # Before Python runs the signal would kill the job; and a short job gets something done.
        delay_s = min(delay_s, (60 * needs.time_limit_min - SIGNAL_EARLY_S) // 2)
    env = {
        **process_tuning.child_environment(),
        "PYTHONPATH": child_python_path(),
        STOP_MARGIN_VARIABLE: str(delay_s),
        **needs.env,
    }
    exports = [f"export {key}={shlex.quote(value)}" for key, value in sorted(env.items())]
    options = sbatch_options(name, needs, allow_requeue=allow_requeue, warning_s=delay_s)
    wanted: dict[str, Any] = {
        "job_name": options.pop("job-name"),
        # None leaves it to the cluster; submitit would ask for five minutes.
        "time": options.pop("time", None),
        "signal_delay_s": delay_s,
        "setup": [*exports, *needs.setup],
        "srun_args": srun_options(needs),
        "additional_parameters": options,
    }
    if needs.parallel_tasks is not None:
        wanted["array_parallelism"] = needs.parallel_tasks
    return wanted


def _failed(name: str, error: Exception) -> SlurmError:
    cause = _cause(error)
    kind = type(error) if isinstance(error, SlurmUnresponsiveError) else classify_failure(cause)
    what = "was not answered" if kind is SlurmUnresponsiveError else "refused the job"
    return kind(f"{name}: sbatch {what}: {cause}")


def _cause(error: Exception) -> str:
    """Slurm's own words out of submitit's error."""
    lines = [line for line in str(error).splitlines() if "sbatch: error" in line]
    return "; ".join(line.split("sbatch: error:")[-1].strip() for line in lines) or str(error)
