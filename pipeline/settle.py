"""Whether a start and what a run holds belong together; if not, what is to become of the results.

Nothing that is committed is removed because it no longer matches. A start that differs is refused
before anything is touched, unless it says ``--redo`` or ``--keep``. With ``--redo`` the run becomes
what a fresh one of the configuration would be: only results that are the same in both stay, and the
others are set aside in the run, with the ledger of what was kept earlier. With ``--keep`` the old
results count, and the ledger ``kept.json`` says what differed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from pipeline.committed import Committed, has_results
from pipeline.flow import Node
from pipeline.record import edited, recorded, write_record
from rlinf.artifacts import write_atomic
from rlinf.errors import CodeError, ConfigError, MismatchError
from stages.code import Code, read_code
from stages.flow import EVALUATE, Flow
from stages.identity import Kept
from stages.layout import ANSWERS, CODE, CONFIG, KEPT
from stages.runner import read_config

SHOWN = 6
"""Differences that a message names."""
ANOTHER = {
    "model.": "weights of another model",
    "flow:": "weights of another model",
    "trainer.lora": "state of other adapters",
    "optimizer.name": "moments of another optimizer",
}
"""What a run cannot go on from, by how the changed keys begin: no trainer reads it."""
log = logging.getLogger("rlinf")


class Choice(StrEnum):
    """What to do about results that a start would not make the same."""

    ASK = "ask"
    REDO = "redo"
    KEEP = "keep"

    @classmethod
    def of(cls, *, redo: bool, keep: bool) -> Choice:
        """
        Raises:
            ConfigError: both.
        """
        if redo and keep:
            raise ConfigError("--redo makes results anew and --keep keeps them: give one of them")
        return cls.REDO if redo else cls.KEEP if keep else cls.ASK


def settle_frozen(committed: Committed, choice: Choice = Choice.ASK) -> None:
    """:func:`settle` for a run as it is on disk; an edited ``config.yaml`` is noticed.

    Raises:
        MismatchError: it was edited, or see there.
        ConfigError: it cannot be read.
    """
    folder = committed.run.folder
    changes = edited(folder)
    settle(committed, choice, edits=changes)
    if changes or choice is not Choice.ASK or not recorded(folder):
        write_record(folder, read_config(folder / CONFIG))


def settle(
    committed: Committed, choice: Choice, changes: Sequence[str] = (), edits: Sequence[str] = ()
) -> None:
    """Find what is done; see that all of it is what this start would make.

    Args:
        changes: how the configuration of this start differs from that of the run.
        edits: how ``config.yaml`` of the run was edited or damaged.

    Raises:
        MismatchError: something is not, and nobody said what to do; nothing was touched.
    """
    folder = committed.run.folder
    before = _code_before(folder)
    committed.recover()
    why = changes = [*edits, *changes]
    if committed.stale:
        why = why + _code_differences(before, committed.code)
    if choice is Choice.REDO:
        _redo(committed)
        committed.recover()
    elif committed.stale or changes:
        if choice is Choice.ASK:
            _refuse_other_results(committed, why, edits)
        else:
            _keep(committed, why, changes)
        committed.recover()
    if before != committed.code:
        write_atomic(folder / CODE, committed.code.to_json())


def _refuse_other_results(committed: Committed, why: Sequence[str], edits: Sequence[str]) -> None:
    """Accept another configuration where no result that is there depends on what differs.

    Raises:
        MismatchError: some do, or the configuration of a run with results was edited.
    """
    folder = committed.run.folder
    committed.recover(kept=False)
    results = has_results(folder)
    if committed.stale or committed.leftovers() or (edits and results):
        affected = committed.affected(committed.redone())
        raise MismatchError(_message(folder, why, affected, committed.graph.flow))
    there = "what is finished there is not affected" if results else "nothing was finished there"
    log.warning(
        "%s: %s, so this start replaces the frozen configuration; it differs: %s",
        folder,
        there,
        "; ".join(_short(why)),
    )


def _redo(committed: Committed) -> None:
    """Set aside all that a fresh run of the configuration would not have."""
    ledger = committed.run.folder / KEPT
    if ledger.exists():
        committed.move_aside(ledger)
    committed.recover(kept=False)
    gone, leftovers = committed.redone(), committed.leftovers()
    affected = committed.affected(gone)
    _set_answers_aside(committed, affected)
    for node in gone:
        committed.set_aside(node)
    for folder in leftovers:
        committed.move_aside(folder)
    if gone:
        flow = committed.graph.flow
        log.info("%s made anew; the old is in %s", _named(affected, flow), committed.aside)
    if leftovers:
        names = ", ".join(str(path.relative_to(committed.run.folder)) for path in leftovers[:SHOWN])
        more = f" and {len(leftovers) - SHOWN} more" if len(leftovers) > SHOWN else ""
        log.info("not part of the run any more, now in %s: %s%s", committed.aside, names, more)


def _set_answers_aside(committed: Committed, affected: Sequence[Node]) -> None:
    """Set a judge's answers aside, and what they cost, where all rewards are made anew.

    Where some rewards stay, so do the answers: they are of these, and count against one budget.
    """
    judging = {
        name for name, stage in committed.graph.flow.table.items() if "reward" in stage.sections
    }
    there = {*committed.done, *committed.waiting, *committed.stale}
    rewards = {node for node in there if node.stage in judging}
    answers = committed.run.folder / ANSWERS
    if rewards and rewards <= set(affected) and answers.exists():
        committed.move_aside(answers)


def _keep(committed: Committed, why: Sequence[str], changes: Sequence[str]) -> None:
    """
    Raises:
        MismatchError: what is there cannot be gone on with.
    """
    folder = committed.run.folder
    keys = [change.removeprefix(f"{CONFIG}: ") for change in changes]
    fixed = [(what, key) for key in keys for of, what in ANOTHER.items() if key.startswith(of)]
    if fixed and committed.stale:
        what, key = fixed[0]
        raise MismatchError(
            f"{folder}: --keep cannot go on with the {what} ({key}); "
            "--redo makes everything anew, another run.name starts another run"
        )
    entry = Kept(
        when=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        why=tuple(why),
        outputs=dict(committed.keys(committed.stale)),
    )
    ledger = committed.ledger.model_copy(update={"kept": (*committed.ledger.kept, entry)})
    write_atomic(folder / KEPT, ledger.model_dump_json(indent=1))
    log.info(
        "kept: %s, though different: %s",
        _named(committed.stale, committed.graph.flow),
        "; ".join(_short(why)),
    )


def _message(folder: Path, why: Sequence[str], affected: Sequence[Node], flow: Flow) -> str:
    return (
        f"{folder}: this start would not make what the run holds; {_named(affected, flow)} would "
        "be made anew.\n"
        f"differs: {'; '.join(_short(why))}\n"
        "--redo makes it anew and sets the old results aside, --keep goes on with what is there "
        "and notes it in the run\n"
        "(Snakemake: --config redo=1 or keep=1); another run.name starts another run"
    )


def _short(why: Sequence[str]) -> list[str]:
    rest = len(why) - SHOWN
    return [*why[:SHOWN], *([f"and {rest} more"] if rest > 0 else [])]


def _named(nodes: Sequence[Node], flow: Flow) -> str:
    """``the warm start, 3 iterations (0 to 2), 1 evaluation``."""
    iterations = sorted({node.iteration for node in nodes if node.stage in flow.stages})
    evaluations = sum(node.stage == EVALUATE for node in nodes)
    parts = ["the warm start"] if any(node.stage in flow.offline for node in nodes) else []
    if iterations:
        span = (
            f" ({iterations[0]} to {iterations[-1]})"
            if len(iterations) > 1
            else f" ({iterations[0]})"
        )
        parts.append(f"{len(iterations)} iteration{'s' * (len(iterations) > 1)}{span}")
    if evaluations:
        parts.append(f"{evaluations} evaluation{'s' * (evaluations > 1)}")
    return ", ".join(parts) or "nothing"


def _code_before(folder: Path) -> Code | None:
    try:
        return read_code(folder)
    except CodeError as error:
        log.warning("%s", error)
        return None


def _code_differences(before: Code | None, now: Code) -> list[str]:
    if before is None:
        return ["code: the program that made it did not record its modules"]
    return [f"code: {name}" for name in before.differing(now)]
