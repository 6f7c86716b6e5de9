"""Every start of a batch is done once, whoever comes, goes or fails meanwhile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.pools.rollout_scheduler import MAX_IN_FLIGHT, WorkerSpeeds, WorkQueue, assign_work

WORKERS = ("a", "b", "c")


@given(
    st.integers(1, 40),
    st.sets(st.integers(0, 39)),
    st.lists(st.tuples(st.sampled_from(["out", "done", "back", "lost"]), st.integers(0, 9))),
    st.sampled_from([1.0, 3.5, float("inf")]),
)
def test_a_start_is_left_held_or_done_and_in_the_end_all_are_done(
    size: int, there: set[int], acts: list[tuple[str, int]], least: float
) -> None:
    queue = WorkQueue(size, {start for start in there if start < size})
    speeds = {"a": 1.0, "b": 2.5, "c": 0.1}
    for act, chance in acts:
        worker = WORKERS[chance % len(WORKERS)]
        held = queue.items_of(worker)
        if act == "out":
            assign_work([queue], speeds, least)
        elif act == "lost":
            queue.requeue_worker(worker)
        elif held:
            (queue.mark_done if act == "done" else queue.requeue)(
                worker, held[chance % len(held)][0]
            )
        _check(queue, size)
    while not queue.is_complete:
        assert assign_work([queue], speeds, least) or any(queue.items_of(w) for w in WORKERS)
        for worker in WORKERS:
            for item in queue.items_of(worker):
                queue.mark_done(worker, item.number)
        _check(queue, size)
    assert queue.done == set(range(size))


def _check(queue: WorkQueue, size: int) -> None:
    held = [p for worker in WORKERS for item in queue.items_of(worker) for p in item.prompts]
    assert len(held) == len(set(held)), "nobody does what another does"
    assert not queue.done & set(held)
    assert queue.num_pending + len(held) + len(queue.done) == size


def test_what_a_lost_worker_held_is_given_out_before_the_rest() -> None:
    queue = WorkQueue(10)
    first = queue.assign("a", 3)
    queue.assign("b", 2)
    queue.requeue_worker("a")
    assert queue.assign("b", 4).prompts == (0, 1, 2, 5)
    assert queue.mark_done("a", first.number) is None, "too late"
    assert not queue.done


def test_workers_hold_few_work_items_and_the_earlier_batch_goes_first() -> None:
    early, late = WorkQueue(3), WorkQueue(9)
    given = assign_work([early, late], {"a": 1.0, "b": 1.0}, 1.0)
    assert next(batch for batch, _, _ in given) is early
    assert early.num_pending == 0 or all(batch is early for batch, _, _ in given)
    for worker in ("a", "b"):
        assert len(early.items_of(worker)) + len(late.items_of(worker)) == MAX_IN_FLIGHT
    assert not assign_work([early, late], {"a": 1.0, "b": 1.0}, 1.0)


def test_claims_get_smaller_towards_the_end() -> None:
    queue, sizes = WorkQueue(64), []
    while queue.num_pending:
        for _, worker, item in assign_work([queue], {"a": 1.0, "b": 1.0}, 1.0):
            sizes.append(len(item.prompts))
            queue.mark_done(worker, item.number)
    assert sizes[0] == 16
    assert sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)


def test_where_time_hardly_depends_on_the_size_a_worker_gets_its_whole_share() -> None:
    pace = WorkerSpeeds()
    for size in (2, 4, 8):
        pace.record("a", size, 10.0)
    queue = WorkQueue(64)
    given = assign_work([queue], pace.speeds(["a", "b", "c", "d"]), pace.min_item_size())
    assert sorted(len(item.prompts) for _, _, item in given) == [16, 16, 16, 16]


def test_a_faster_worker_gets_more() -> None:
    pace = WorkerSpeeds()
    for _ in range(3):
        pace.record("slow", 4, 4.0)
        pace.record("fast", 4, 1.0)
    given = assign_work([WorkQueue(100)], pace.speeds(["slow", "fast"]), pace.min_item_size())
    sizes = {worker: len(item.prompts) for _, worker, item in given[:2]}
    assert sizes["fast"] > 2 * sizes["slow"]
