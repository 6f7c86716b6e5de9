"""Whoever comes, goes, fails or leaves a tail behind: every start of every rollout is done once."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.graph import StageNode
from pipeline.pools.rollout_scheduler import WORK_LOG, RolloutScheduler
from rlinf.artifacts import Manifest, content_digest
from rlinf.errors import EXIT_BAD_INPUT, EXIT_REQUEUE, InputError
from stages.layout import POOLS_FOLDER
from stages.worker import messages

BATCH = 12
ROLLOUTS = (StageNode("rollout", 3), StageNode("rollout", 4))
GENERATORS, HELPER = ("pool-0w0-0-r0", "pool-0w1-0-r0"), "pool-1-0-r0"
WORKERS = (*GENERATORS, HELPER)
SPANS = (("generate", 0.0, 1.0),)


class Cluster:
    """Workers that do what they are ordered, when a test says so."""

    def __init__(self, run: Path) -> None:
        (run / POOLS_FOLDER).mkdir()
        manifest = Manifest("sync", 2, "", content_digest({}, {}), "data", {}, {}, {}, {}, "", "")
        (run / "weights").mkdir()
        (run / "weights" / "manifest.json").write_text(manifest.to_json())
        self.run, self.there = run, set(WORKERS)
        self.generators = RolloutScheduler(run, BATCH, max_failures=1000)
        for node in ROLLOUTS:
            self.generators.start_rollout(node, node.name, "weights", HELPER)
            self.generators.on_collected(node, [])
        self.queues: dict[str, list[messages.GenerateStarts]] = defaultdict(list)
        self.heirs: dict[str, str] = {}

    def tick(self) -> None:
        """The driver looks who has nothing to do; the helper is to train iteration 3 next."""
        present = [worker for worker in GENERATORS if worker in self.there]
        helpers = {HELPER: 3} if HELPER in self.there else {}
        for worker, order in self.generators.next_orders(present, helpers):
            assert worker in self.there
            if isinstance(order, messages.ReassignWork):
                assert worker == HELPER
                assert order.successor in present
                self.heirs[order.work_item] = order.successor
                continue
            assert isinstance(order, messages.GenerateStarts)
            assert worker != HELPER or order.iteration == 3, "training comes first"
            if order.partial:
                assert self.heirs[order.partial.channel.rpartition("-")[2]] == worker
            self.queues[worker].append(order)

    def orders(self) -> list[tuple[str, messages.GenerateStarts]]:
        """To the generators that are there."""
        orders = self.generators.next_orders([w for w in GENERATORS if w in self.there])
        return [
            (worker, order)
            for worker, order in orders
            if isinstance(order, messages.GenerateStarts)
        ]

    def end(self, worker: str, code: int = 0, rest: int = 0) -> None:
        """A worker is through with its next work item; ``rest`` of its starts go to a successor."""
        if worker in self.there and self.queues[worker]:
            order = self.queues[worker].pop(0)
            report = messages.WorkItemEnded(
                work_item=order.work_item, host="h", exit_code=code, spans=SPANS
            )
            if rest and not code and order.work_item in self.heirs and order.starts:
                left = {"unfinished_starts": order.starts[-rest:], "num_partial_samples": rest}
                report = report.model_copy(
                    update={**left, "successor": self.heirs[order.work_item]}
                )
            self.generators.on_report(worker, report)

    def until_an_heir_is_named(self) -> tuple[str, str]:
        """Generators do all work items; the helper only loads its engine."""
        while not self.heirs:
            self.tick()
            for worker in GENERATORS:
                self.end(worker)
            if self.queues[HELPER] and not self.queues[HELPER][0].starts:
                self.end(HELPER)
        return next(iter(self.heirs.items()))

    def lose(self, worker: str) -> None:
        self.there.discard(worker)
        self.queues[worker].clear()
        self.generators.on_worker_lost(worker)

    def done(self, node: StageNode) -> list[int]:
        """The starts that were noted as done."""
        path = self.run / POOLS_FOLDER / WORK_LOG
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines]
        return sorted(s for row in rows if row["node"] == node.name for s in row["starts"])


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["tick", "end", "hand over", "fail", "lose", "join"]),
        st.sampled_from(WORKERS),
        st.integers(1, 3),
    ),
    max_size=40,
)


@given(ACTS)
def test_every_start_is_done_once_whatever_happens(acts: list[tuple[str, str, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        cluster = Cluster(Path(name))
        for act, worker, count in acts:
            match act:
                case "tick":
                    cluster.tick()
                case "lose":
                    cluster.lose(worker)
                case "join":
                    cluster.there.add(worker)
                case "fail":
                    cluster.end(worker, EXIT_REQUEUE)
                case _:
                    cluster.end(worker, rest=count if act == "hand over" else 0)
            for node in ROLLOUTS:
                done = cluster.done(node)
                assert len(done) == len(set(done))
        cluster.there.update(WORKERS)
        for _ in range(100):
            cluster.tick()
            for worker in WORKERS:
                cluster.end(worker)
        for node in ROLLOUTS:
            assert cluster.done(node) == list(range(BATCH))


def test_a_helper_hands_over_when_nothing_is_left_to_give_out(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.tick()
    for worker in WORKERS:
        cluster.end(worker)  # their engines are loaded
    cluster.tick()
    held = cluster.queues[HELPER][0]
    assert not cluster.heirs, "starts of iteration 3 are left"
    while not cluster.heirs:
        for worker in GENERATORS:
            cluster.end(worker)
        cluster.tick()
    heir = cluster.heirs[held.work_item]
    cluster.end(HELPER, rest=1)
    cluster.lose(next(worker for worker in GENERATORS if worker != heir))
    cluster.tick()
    assert not cluster.queues[HELPER][1:], "starts that come back are for generators"
    (order,) = [order for order in cluster.queues[heir] if order.partial]
    assert order.starts == held.starts[-1:]
    assert order.partial is not None
    assert order.partial.num_samples == 1


def test_another_heir_is_named_when_one_is_lost_before_it_inherits(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    name, heir = cluster.until_an_heir_is_named()
    assert cluster.generators.is_busy(heir), "it is not to be let go"
    cluster.lose(heir)
    cluster.tick()
    assert cluster.heirs[name] in set(GENERATORS) - {heir}


def test_what_was_left_to_a_generator_that_is_gone_is_begun_anew(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    name, heir = cluster.until_an_heir_is_named()
    held = next(order for order in cluster.queues[HELPER] if order.work_item == name)
    while cluster.queues[HELPER][0] is not held:
        cluster.end(HELPER)
    cluster.end(HELPER, rest=1)
    cluster.lose(heir)
    cluster.tick()
    orders = [order for queue in cluster.queues.values() for order in queue]
    assert not any(order.partial for order in orders)
    assert held.starts[-1] in [s for o in orders if o.iteration == 3 for s in o.starts]


def test_claims_go_to_those_who_have_the_weights_until_they_are_committed(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    first, second = GENERATORS
    cluster.tick()
    for worker in WORKERS:
        cluster.end(worker)  # their engines are loaded
    for node in ROLLOUTS:
        cluster.generators.end_rollout(node)
    live = StageNode("rollout", 5)
    cluster.queues.clear()
    cluster.generators.start_rollout(live, live.name, "later", HELPER)
    cluster.generators.on_collected(live, [])
    assert not cluster.orders(), "nobody has the weights"
    cluster.generators.on_weights(first, "later", "data-a", 4)
    orders = cluster.orders()
    assert {(worker, order.weights_attempt) for worker, order in orders} == {(first, "data-a")}
    cluster.generators.invalidate_weights("later")
    cluster.lose(first)
    assert not cluster.orders(), "they are made again"
    cluster.generators.on_weights(second, "later", "data-b", 4)
    assert {order.weights_attempt for _, order in cluster.orders()} == {"data-b"}
    (tmp_path / "later").symlink_to("weights")
    cluster.lose(second)
    cluster.there.add(first)
    orders = cluster.orders()
    assert {(worker, order.weights_attempt) for worker, order in orders} == {(first, None)}
    assert not orders[0][1].starts, "it loads an engine first"


def test_a_claim_that_found_no_weights_in_memory_waits_for_their_commit(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    worker = GENERATORS[0]
    cluster.tick()
    cluster.end(worker)
    for node in ROLLOUTS:
        cluster.generators.end_rollout(node)
    cluster.queues.clear()
    live = StageNode("rollout", 5)
    cluster.generators.start_rollout(live, live.name, "later", HELPER)
    cluster.generators.on_collected(live, [])
    cluster.generators.on_weights(worker, "later", "data-a", 4)
    for _, order in cluster.orders():
        report = messages.WorkItemEnded(work_item=order.work_item, host="h", exit_code=EXIT_REQUEUE)
        cluster.generators.on_report(worker, report)
    assert not cluster.orders()


def test_bad_input_and_errors_of_the_users_code_are_not_tried_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.tick()
    worker = next(worker for worker in GENERATORS if cluster.queues[worker])
    with pytest.raises(InputError, match=ROLLOUTS[0].name):
        cluster.end(worker, code=EXIT_BAD_INPUT)


def test_claims_whose_weights_were_withdrawn_wait_until_they_are_made_again(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path)
    cluster.tick()
    for worker in WORKERS:
        cluster.end(worker)  # their engines are loaded
    (tmp_path / "weights" / "manifest.json").rename(tmp_path / "withdrawn")
    for _ in ROLLOUTS:
        cluster.tick()
        for worker in WORKERS:
            while cluster.queues[worker]:
                cluster.end(worker, EXIT_REQUEUE)
    assert not cluster.orders()
    (tmp_path / "withdrawn").rename(tmp_path / "weights" / "manifest.json")
    assert any(order.starts for _, order in cluster.orders())


def test_an_heir_goes_on_with_the_weights_that_the_tail_was_begun_with(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.tick()
    for worker in WORKERS:
        cluster.end(worker)
    for node in ROLLOUTS:
        cluster.generators.end_rollout(node)
    cluster.queues.clear()
    live = StageNode("rollout", 3)
    cluster.generators.start_rollout(live, live.name, "later", HELPER)
    cluster.generators.on_collected(live, [])
    cluster.generators.on_weights(HELPER, "later", "data-a", 2)
    cluster.tick()
    while len(cluster.queues[HELPER]) > 1:  # as long as it gets another for each that it does
        cluster.end(HELPER)
        cluster.tick()
    assert not cluster.heirs, "no generator has the weights"
    cluster.generators.on_weights(GENERATORS[1], "later", "data-a", 2)
    cluster.tick()
    assert set(cluster.heirs.values()) == {GENERATORS[1]}
    (tmp_path / "later").symlink_to("weights")
    cluster.end(HELPER, rest=1)
    cluster.tick()
    (order,) = [order for order in cluster.queues[GENERATORS[1]] if order.partial]
    assert order.weights_attempt == "data-a"
