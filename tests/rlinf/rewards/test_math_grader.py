"""No response can hang the grader, exhaust the machine, or outlive the stage; all is counted."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlinf.package_paths import child_python_path
from rlinf.rewards.math_extraction import ReasoningTags
from rlinf.rewards.math_grader import CROSS_CHECK_EVERY, MEMORY_BYTES, MathGrader, count_outcomes

pytest.importorskip("math_verify", reason="the extra 'math' is not installed")
HANGS = "$9^{9^{9^{9}}}$"


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    made = MathGrader(workers=2, timeout_s=1.0, max_consecutive_timeouts=3)
    yield made
    made.close()


def started(grader: MathGrader) -> None:
    """Wait until all its workers have imported what they need."""
    while not all(worker.ready for worker in grader._workers):
        grader.grade([("x^2+x", "x(x+1)")])


def processes(grader: MathGrader) -> list[psutil.Process]:
    return [psutil.Process(worker._process.pid) for worker in grader._workers]


def test_a_response_that_hangs_the_parser_times_out_alone(grader: MathGrader) -> None:
    grades = grader.grade([("#### 3", "#### 3"), (HANGS, "4"), ("#### 5", "#### 5")])
    assert [grade.score for grade in grades] == [1, 0, 1]
    assert grades[1].outcome == "timeout"


def test_the_grader_works_on_after_a_timeout(grader: MathGrader) -> None:
    pairs = [(f"#### {i}", "#### 2") for i in range(4)]
    assert [grade.score for grade in grader.grade(pairs)] == [0, 0, 1, 0]


def test_what_could_not_be_graded_is_counted(grader: MathGrader) -> None:
    grades = grader.grade([(HANGS, "4"), ("no idea (((", "4"), ("4", "4"), ("5", "4")])
    assert count_outcomes(grades) == {
        "timeouts": 1,
        "parse_failures": 1,
        "grader_deaths": 0,
        "unfinished_thoughts": 0,
        "math_verify_opinions": 0,
        "math_verify_disagreements": 0,
    }


def test_math_verify_has_a_second_opinion_on_a_part_of_the_answers(grader: MathGrader) -> None:
    right, option = ("4", "4"), ("The answer is **B**.", "B")
    grades = grader.grade([option, *[right] * (CROSS_CHECK_EVERY - 1), right])
    assert [grade.score for grade in grades] == [1.0] * len(grades)
    assert [i for i, grade in enumerate(grades) if grade.math_verify_score is not None] == [
        0,
        CROSS_CHECK_EVERY,
    ]
    assert (grades[0].math_verify_score, grades[-1].math_verify_score) == (0.0, 1.0)
    counts = count_outcomes(grades)
    assert (counts["math_verify_opinions"], counts["math_verify_disagreements"]) == (2, 1)


def test_a_second_opinion_that_takes_too_long_changes_no_grade(grader: MathGrader) -> None:
    (grade,) = grader.grade([(f"{HANGS} so \\boxed{{4}}", "4")])
    assert (grade.score, grade.outcome) == (1.0, "graded")


def test_an_unfinished_thought_has_no_answer_and_is_counted(grader: MathGrader) -> None:
    grades = grader.grade([("<think>\\boxed{4}", "4"), ("<think>5</think>4", "4")])
    assert [grade.score for grade in grades] == [0.0, 1.0]
    assert count_outcomes(grades)["unfinished_thoughts"] == 1


def test_a_prompt_that_opens_a_thought_leaves_the_closing_mark_to_the_response() -> None:
    grader = MathGrader(1, 5.0, reasoning_tags=ReasoningTags(starts_open=True))
    grades = grader.grade([("\\boxed{4} then", "4"), ("\\boxed{5}</think>\n4", "4")])
    grader.close()
    assert [(grade.score, grade.outcome) for grade in grades] == [
        (0.0, "unfinished"),
        (1.0, "graded"),
    ]


def test_a_batch_whose_answers_all_time_out_ends_after_a_few(grader: MathGrader) -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    grades = grader.grade([(HANGS, "4")] * 200)
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used
    assert {grade.outcome for grade in grades} == {"timeout"}
    assert used < 40, "three or four limits of at most two seconds each, and the imports"


def test_a_run_of_timeouts_costs_nothing_before_it_and_all_behind_it(grader: MathGrader) -> None:
    pairs = [("4", "4"), (HANGS, "4"), ("4", "4"), *[(HANGS, "4")] * 3, *[("4", "4")] * 20]
    grades = grader.grade(pairs)
    assert [grade.score for grade in grades] == [1, 0, 1] + [0] * 23
    assert count_outcomes(grades)["timeouts"] == 24


def test_workers_that_died_while_idle_are_replaced(grader: MathGrader) -> None:
    started(grader)
    for worker in grader._workers:
        os.kill(worker._process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker._process.pid, os.WEXITED | os.WNOWAIT)
    assert [grade.score for grade in grader.grade([("4", "4")] * 4)] == [1] * 4


def test_a_pair_whose_worker_was_killed_is_graded_by_another(grader: MathGrader) -> None:
    started(grader)
    for process in processes(grader):
        process.send_signal(signal.SIGSTOP)
    killer = threading.Timer(0.3, lambda: [process.kill() for process in processes(grader)])
    killer.start()
    grades = grader.grade([("4", "4")] * 4)
    killer.join()
    assert [(grade.score, grade.outcome) for grade in grades] == [(1, "graded")] * 4


def test_a_response_that_takes_too_much_memory_ends_its_worker_alone(grader: MathGrader) -> None:
    # A decimal number of ten thousand million digits.
    grades = grader.grade([(r"$(10^{10^{10}})$", "4"), ("4", "4")])
    assert grades[0].score == 0
    assert grades[0].outcome in ("died", "timeout")
    assert grades[1].score == 1


def test_workers_have_limits(grader: MathGrader) -> None:
    started(grader)
    for process in processes(grader):
        assert process.rlimit(psutil.RLIMIT_AS)[0] == MEMORY_BYTES
        used = sum(process.cpu_times()[:2])
        assert process.rlimit(psutil.RLIMIT_CPU)[0] <= used + 4
        assert process.num_threads() == 1


def test_workers_outlive_the_thread_that_made_the_grader() -> None:
    made: list[MathGrader] = []
    thread = threading.Thread(target=lambda: made.append(MathGrader(1, 5.0)))
    thread.start()
    thread.join()
    (process,) = processes(made[0])
    assert made[0].grade([("4", "4")])[0].score == 1
    assert processes(made[0]) == [process]
    assert process.is_running()
    made[0].close()
    assert not process.is_running()


def test_workers_die_with_the_stage_even_while_they_compute(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, pathlib, signal, threading\n"
        "from rlinf.rewards.math_grader import MathGrader\n"
        "g = MathGrader(1, 100.0)\n"
        "g.grade([('4', '4')])\n"
        f"pathlib.Path({str(pids)!r}).write_text(str(g._workers[0]._process.pid))\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        f"g.grade([({HANGS!r}, '4')])\n"
    )
    environment = {**os.environ, "PYTHONPATH": child_python_path()}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    pid = int(pids.read_text())
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    pytest.fail("a grading process computes on")


def test_half_of_a_surrogate_pair_in_a_response_is_no_crash(grader: MathGrader) -> None:
    assert [grade.score for grade in grader.grade([("\ud800 #### 4", "4")])] == [1]


def test_the_library_is_not_imported_by_who_only_starts_workers() -> None:
    code = (
        "import sys; from rlinf.rewards.math_grader import MathGrader; MathGrader(1, 1.0).close();"
        "sys.exit('sympy' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": child_python_path()}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )
