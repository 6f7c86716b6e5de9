"""Submission of jobs with one call of sbatch, through submitit or with a script of this module.

submitit writes the batch script, pickles the callable, and starts it on the nodes. It does not
support heterogeneous jobs, so this module writes their script, with the same options.
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
_NON_SBATCH_KEYWORDS = frozenset({"setup", "teardown", "srun_args", "additional_parameters"})
"""Keywords of submitit that do not become sbatch options."""
TAG_PREFIX = "rlinf-"
"""Prefix of tags. The tag in the comment of jobs identifies one submission."""
HEALTHY_RUN_S, MAX_QUICK_RESTARTS = 600, 10
"""A killed job is requeued if it ran for ``HEALTHY_RUN_S`` or was restarted fewer than
``MAX_QUICK_RESTARTS`` times."""


def submit_jobs(jobs: Sequence[JobSpec]) -> list[str]:
    """Submit jobs that differ only in arguments and outputs. Returns their ids.

    Several jobs become one job array; a single one does not.

    Raises:
        PlanError: text of a job does not fit into a batch script; nothing was submitted.
        SlurmUnresponsiveError: Slurm does not answer; the job may exist or not.
        SlurmError: the job was refused, with Slurm's message; or the answer contains no readable
            id, and the job was cancelled.
    """
    from submitit.core.utils import FailedJobError

    first, resources = jobs[0], jobs[0].resources
    _create_folders(jobs)
    executor = patched_slurm_executor()(folder=first.log_dir, python=_python(resources))
    defaults = {"array_parallelism": len(jobs)}
    executor.update_parameters(
        **defaults | submitit_parameters(first.name, resources, allow_requeue=first.allow_requeue)
    )
    try:
        with login_environment(), executor.batch():
            submitted = [executor.submit(_module_call(job)) for job in jobs]
        return [str(entry.job_id) for entry in submitted]
    except FailedJobError as error:
        raise _submission_error(first.name, error) from None


def submit_hetjob(jobs: Sequence[JobSpec]) -> list[str]:
    """Submit jobs that start at the same moment, as one heterogeneous job. Returns their ids.

    A job has one or more components, each with its own resources and ranks. If one job fails, the
    others end too, and Slurm reports all jobs as failed.

    Raises:
        SlurmUnresponsiveError, SlurmError: as :func:`submit_jobs`.
    """
    het_job_id = _submit(hetjob_script(jobs), jobs)
    return [f"{het_job_id}+{number}" for number in _first_components(jobs)]


def submit_restarting(job: JobSpec) -> str:
    """Submit a job of one process that is requeued if a signal kills it. Returns its id.

    Raises:
        SlurmUnresponsiveError, SlurmError: as :func:`submit_jobs`.
    """
    return _submit(restarting_script(job), [job])


def _submit(script: str, jobs: Sequence[JobSpec]) -> str:
    _create_folders(jobs)
    tag = _tag_in(jobs[0].resources.sbatch.get("comment"))
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script)
        file.flush()
        try:
            with login_environment():
                answer = run_command(("sbatch", "--parsable", file.name))
        except SlurmError as error:
            raise _submission_error(" and ".join(job.name for job in jobs), error) from None
    try:
        return parse_submitted_id(answer, lambda: _tagged_ids(tag))
    except UnreadableSubmission as error:
        raise _cancel_unreadable(" and ".join(job.name for job in jobs), tag, error) from None


def new_tag() -> str:
    """Return a unique tag for the comment of the jobs of one submission."""
    return f"{TAG_PREFIX}{secrets.token_hex(8)}"


def with_tag(job: JobSpec, tag: str) -> JobSpec:
    """Return the job with a tag in its comment, so that it can be found without its id."""

    def with_comment(part: JobResources) -> JobResources:
        comment = f"{part.sbatch.get('comment', '')} {tag}".strip()
        return replace(part, sbatch={**part.sbatch, "comment": comment})

    extra_components = tuple(with_comment(part) for part in job.extra_components)
    return replace(job, resources=with_comment(job.resources), extra_components=extra_components)


def _tag_in(comment: object) -> str | None:
    """Return the tag in the comment of a job; None without one."""
    match = re.search(rf"(?<!\S){TAG_PREFIX}[0-9a-f]{{16}}$", str(comment or ""))
    return None if match is None else match[0]


def _tagged_ids(tag: str | None) -> list[str]:
    return [] if tag is None else SlurmClient().find_by_comment(tag)


def _cancel_unreadable(name: str, tag: str | None, error: UnreadableSubmission) -> SlurmError:
    """Cancel the jobs of a submission without a readable id. Returns the error to raise."""
    advice = "let sbatch print 'Submitted batch job ID', as Slurm's own does"
    if tag is None:
        state = "the job has no tag to find it by and may be queued: see squeue --me"
        return SlurmError(f"{name}: {error}; {state}; {advice}")
    try:
        job_ids = {parent_job_id(job_id) for job_id in _tagged_ids(tag)}
        SlurmClient().cancel(job_ids)
    except SlurmUnresponsiveError as no_answer:
        return SlurmUnresponsiveError(f"{name}: {error}; {no_answer}")
    except SlurmError as refusal:
        return SlurmError(f"{name}: {error}; it was not cancelled either: {refusal}; {advice}")
    state = (
        f"job {', '.join(sorted(job_ids))} was cancelled" if job_ids else "no such job is queued"
    )
    return SlurmError(f"{name}: {error}; {state}; {advice}")


@functools.cache
def patched_slurm_executor() -> type[Any]:
    """Return submitit's Slurm executor with this project's srun options and parser of job ids.

    The first call replaces the class in submitit, so that Hydra's sweeps use it too
    (``hydra/launcher=submitit_slurm``).
    """
    from submitit.core import plugins
    from submitit.slurm import slurm

    class SlurmExecutor(slurm.SlurmExecutor):
        """The executor of submitit with tagged jobs; see :func:`patched_slurm_executor`."""

        _tag: str | None = None
        """Tag of the current submission."""

        def _submit_command(self, command: str) -> Any:
            self._tag = _tag_in(_comment(self.parameters)) or new_tag()
            try:
                with login_environment():
                    return super()._submit_command(command)
            except UnreadableSubmission as error:
                name = self.parameters.get("job_name", "submitit")
                raise _cancel_unreadable(name, self._tag, error) from None

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            check_script_options({"submitit_folder": self.folder}, "hydra.launcher")
            keywords = _complete_sweep_keywords(self.parameters, self._tag)
            return str(slurm._make_sbatch_string(command=command, folder=self.folder, **keywords))

        # submitit calls this method on the executor, whose tag is needed here.
        def _get_job_id_from_submission_command(  # type: ignore[override]
            self, string: str | bytes
        ) -> str:
            answer = string if isinstance(string, str) else string.decode()
            return parse_submitted_id(answer, lambda: _tagged_ids(self._tag))

    setattr(slurm, "SlurmExecutor", SlurmExecutor)  # noqa: B010 (to mypy it is a type)
    plugins._get_plugins.cache_clear()
    plugins.get_executors.cache_clear()
    return SlurmExecutor


def _comment(keywords: Mapping[str, Any]) -> str:
    extra_options = keywords.get("additional_parameters") or {}
    return str(extra_options.get("comment", keywords.get("comment")) or "")


def _complete_sweep_keywords(keywords: Mapping[str, Any], tag: str | None) -> dict[str, Any]:
    """Return submitit's keywords, completed by the options that a sweep's configuration lacks.

    Args:
        tag: the submission's tag, to be added to the comment; None: the script is not submitted.

    Raises:
        PlanError: several options set the memory of a job, or an option does not fit into its
            line of the script.
    """
    extra = keywords.get("additional_parameters") or {}
    check_script_options(
        {k: v for k, v in keywords.items() if k not in _NON_SBATCH_KEYWORDS}, "hydra.launcher"
    )
    check_script_options(extra, "hydra.launcher.additional_parameters")
    memory = [key for key in ("mem", "mem_per_cpu", "mem_per_gpu") if keywords.get(key) is not None]
    if len(memory) > 1:
        raise PlanError(f"hydra.launcher: {' and '.join(memory)} exclude each other; keep one")
    srun_args = list(keywords.get("srun_args") or ())
    resources = JobResources(cpus_per_task=keywords.get("cpus_per_task") or 1)
    present = {word.partition("=")[0] for word in srun_args}
    srun_args += [word for word in srun_options(resources) if word.partition("=")[0] not in present]
    if tag is not None and tag != _tag_in(_comment(keywords)):
        extra = {**extra, "comment": f"{_comment(keywords)} {tag}".strip()}
    return {"wckey": None, **keywords, "srun_args": srun_args, "additional_parameters": extra}


def batch_script(jobs: Sequence[JobSpec]) -> str:
    """Return the batch script of one job, or of several that start together."""
    first = jobs[0]
    if len(jobs) > 1 or first.extra_components:
        return hetjob_script(jobs)
    executor = patched_slurm_executor()(folder=first.log_dir, python=_python(first.resources))
    executor.update_parameters(
        **submitit_parameters(first.name, first.resources, allow_requeue=first.allow_requeue)
    )
    return str(executor._make_submission_file_text(executor._submitit_command_str, "call"))


def restarting_script(job: JobSpec) -> str:
    """Return the batch script of :func:`submit_restarting`."""
    resources = job.resources
    keywords = submitit_parameters(job.name, resources, allow_requeue=job.allow_requeue)
    keywords["additional_parameters"]["output"] = str(job.log_dir / "%j_batch.log")
    log = shlex.quote(str(job.log_dir / "%j_%t_log"))
    python = _python(resources)
    call = [
        *keywords["srun_args"],
        python,
        "-u -m launchers.job_entrypoint",
        shlex.quote(_module_call(job).to_json()),
    ]
    start = f"srun --unbuffered --output {log}.out --error {log}.err {' '.join(call)}"
    restart_code = _RESTART_CODE.format(
        long_s=HEALTHY_RUN_S, times=MAX_QUICK_RESTARTS, requeue=f"{python} -m slurm.requeue"
    )
    header = [*_directives(keywords), "", *keywords["setup"]]
    return "\n".join(["#!/bin/bash", *header, start]) + restart_code


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
            keywords = submitit_parameters(job.name, resources, allow_requeue=job.allow_requeue)
            keywords["additional_parameters"]["output"] = str(job.log_dir / "%j_batch.log")
            directives.append(_directives(keywords))
            call = [
                _python(resources),
                "-u",
                "-m",
                "launchers.job_entrypoint",
                shlex.quote(_module_call(job).to_json()),
            ]
            lines = [
                *keywords["setup"],
                f"export {HET_GROUPS_VARIABLE}={groups}",
                f"exec {' '.join(call)}",
            ]
            step = [f"--het-group={number}", *keywords["srun_args"], "bash", "-c", "\n".join(lines)]
            steps.append(f"--unbuffered --output {log}.out --error {log}.err {shlex.join(step)}")
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
        options = _all_options(submitit_parameters(key, resources))
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


def _all_options(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return sbatch's options by name for the keywords of :func:`submitit_parameters`."""
    values = {
        # Without this, a component without GPUs would inherit those of an earlier component.
        "gres": "none",
        "job-name": keywords["job_name"],
        "time": keywords["time"],
        **keywords["additional_parameters"],
    }
    return {key: value for key, value in values.items() if value is not None}


def _directives(keywords: Mapping[str, Any]) -> list[str]:
    """Return the options as ``#SBATCH`` lines, as submitit writes them."""
    return [
        f"#SBATCH --{name}" + (f"={shlex.quote(str(value))}" * (value is not True))
        for name, value in sorted(_all_options(keywords).items())
    ]


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


def _module_call(job: JobSpec) -> ModuleCall:
    speeds = job.resources.speed_weights or ()
    pairs = tuple(speeds.items() if isinstance(speeds, Mapping) else (("", s) for s in speeds))
    path = tuple(child_python_path().split(os.pathsep))
    return ModuleCall(job.module, job.argv, path, str(job.log_dir), pairs, job.allow_requeue)


@contextlib.contextmanager
def login_environment() -> Iterator[None]:
    """Remove the variables that Slurm set in this job from the environment, as on a login node.

    sbatch passes its environment on, so these variables would also affect the new job's srun.
    """
    from submitit.helpers import clean_env

    job_variables = [name for name in os.environ if name.startswith(SLURM_ENV_PREFIXES)]
    controller_variables = {
        name: value for name, value in os.environ.items() if name in CONTROLLER_ENV
    }
    with clean_env(job_variables), block_stop_signals():
        os.environ.update(controller_variables)
        yield


def submitit_parameters(
    name: str, resources: JobResources, *, allow_requeue: bool = True
) -> dict[str, Any]:
    """Return submitit's keywords for the resources of a job.

    sbatch options are ``additional_parameters`` under their own names
    (:func:`slurm.sbatch_options.sbatch_options`), except the job's name and time.

    Args:
        allow_requeue: whether Slurm itself restarts the job after preemption or a node failure.
    """
    delay_s = resources.signal_delay_s
    if resources.time_limit_min is not None:
        # Leave a short job half of its time; a signal before Python has started would kill it.
        delay_s = min(delay_s, (60 * resources.time_limit_min - SIGNAL_EARLY_S) // 2)
    env = {
        **process_tuning.child_environment(),
        "PYTHONPATH": child_python_path(),
        STOP_MARGIN_VARIABLE: str(delay_s),
        **resources.env,
    }
    exports = [f"export {key}={shlex.quote(value)}" for key, value in sorted(env.items())]
    options = sbatch_options(name, resources, allow_requeue=allow_requeue, warning_s=delay_s)
    keywords: dict[str, Any] = {
        "job_name": options.pop("job-name"),
        # None is the cluster's default; submitit would request five minutes.
        "time": options.pop("time", None),
        "signal_delay_s": delay_s,
        "setup": [*exports, *resources.setup],
        "srun_args": srun_options(resources),
        "additional_parameters": options,
    }
    if resources.array_parallelism is not None:
        keywords["array_parallelism"] = resources.array_parallelism
    return keywords


def _submission_error(name: str, error: Exception) -> SlurmError:
    cause = _slurm_message(error)
    cls = type(error) if isinstance(error, SlurmUnresponsiveError) else classify_failure(cause)
    outcome = "was not answered" if cls is SlurmUnresponsiveError else "refused the job"
    return cls(f"{name}: sbatch {outcome}: {cause}")


def _slurm_message(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if "sbatch: error" in line]
    return "; ".join(line.split("sbatch: error:")[-1].strip() for line in lines) or str(error)
