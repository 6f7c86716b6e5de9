"""Whatever fails, comes or goes: every stage and every start of a rollout is done once."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from cProfile import Profile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.commands.experiment import compose as hydra_compose
from pipeline.executors import stage_call
from pipeline.graph import StageNode
from pipeline.plan import Plan
from pipeline.pools.leases import PoolState
from pipeline.pools.scheduler import MAX_IN_FLIGHT, ShareItem, StageItem
from pipeline.pools.worker_speeds import WorkerSpeeds
from rlinf.config import RunConfig
from rlinf.errors import EXIT_BAD_INPUT, EXIT_REQUEUE, InputError, StageError
from stages.worker import messages
from stages.worker.messages import GenerateStarts, StageOrder, WorkItemEnded
from tests.conftest import QUIET, TINY
from tests.pipeline.pools.helpers import HELD, MAX_FAILURES, STAGES, Pools, checked

BATCH, ITERATIONS = 12, 3
SPANS = (("generate", 0.0, 1.0),)
ELASTIC = {
    "num_chunks": 2,
    "pools": [
        {"stages": ["rollout"], "workers": 1, "devices": {"local": 1}},
        {"stages": HELD[1:], "devices": {"local": 1}, "also_generates": True},
    ],
}
"""Two generators (the second is added by hand), and a trainer that helps."""
WORKERS = FIRST, SECOND, HELPER = range(3)
"""Pools of the two generators and of the helper."""


@cache
def elastic_experiment() -> tuple[RunConfig, Plan]:
    words = [f"rollout.batch_size={BATCH}", f"iterations={ITERATIONS}", "rollout.staleness=1"]
    words += ["evaluate.every=0", "run.root=/tmp"]
    words = ["experiment=arithmetic_grpo", "cluster=local", *TINY, *QUIET, *words]
    words = [word if word in words[:2] else f"++{word.lstrip('+')}" for word in words]
    return checked(hydra_compose(words), ELASTIC)


class Elastic(Pools):
    """Workers that do what they are ordered, when a test says so, and the driver."""

    def __init__(self, folder: Path) -> None:
        super().__init__(*elastic_experiment(), folder)
        first, helper = self.pools
        self.by_number = [first, PoolState(0, (), first.resources, slot=1), helper]
        self.pools.insert(1, self.by_number[SECOND])
        self.committed.add("sft")
        self.nodes = [node for node in self.graph.nodes() if node.stage in STAGES]
        self.newest = Counter[int]()
        """Number of the newest lease of each pool."""
        self.shares: dict[str, list[GenerateStarts]] = defaultdict(list)
        """Shares of each worker."""
        self.stages: dict[str, tuple[str, StageOrder]] = {}
        """Worker and order of each running stage."""
        self.reassigned: set[str] = set()
        self.done: dict[str, list[int]] = defaultdict(list)
        """Finished starts of the newest attempt at each rollout."""
        self.ended: list[str] = []
        """Names of committed stages."""

    def worker(self, number: int) -> str:
        """The worker of the newest lease of a pool, connected or not."""
        return f"pool-{self.by_number[number].name}-{self.newest[number]}-r0"

    def connect(self, number: int) -> None:
        """Connect a lease of a pool that has none."""
        if not self.by_number[number].leases:
            self.newest[number] += 1
            self.lease(number, self.newest[number])
            self.scheduler.on_joined(self.worker(number))

    def lose(self, number: int) -> None:
        for lease in list(self.by_number[number].leases):
            self.by_number[number].leases.clear()
            self.shares.pop(self.worker(number), None)
            lost = {n for n, (worker, _) in self.stages.items() if worker == self.worker(number)}
            nodes = self.scheduler.on_lease_lost(lease)
            assert {node.name for node in nodes} == lost
            for node in nodes:
                del self.stages[node.name]
                self.add(node)
        self.receive()

    def tick(self) -> None:
        self.now += 1
        self.scheduler.dispatch(self.now)
        self.receive()

    def receive(self) -> None:
        """The workers get the orders that were sent."""
        orders = [*self.sent]
        self.sent.clear()
        for worker, order in orders:
            match order:
                case messages.RunStages():
                    for stage in order.stages:
                        assert stage.node not in self.stages, "it is computed once at a time"
                        self.stages[stage.node] = worker, stage
                        if stage.receives_trajectories:
                            self.done[stage.node] = []
                            self.scheduler.on_collected(worker, stage.node, [])
                case GenerateStarts():
                    is_helper = worker == self.worker(HELPER)
                    assert not is_helper or order.partial is None
                    self.shares[worker].append(order)
                case messages.ReassignWork():
                    assert worker == self.worker(HELPER)
                    self.reassigned.add(order.work_item)
                case messages.CancelWork():
                    self.shares[worker].clear()
        for shares in self.shares.values():
            assert len([share for share in shares if not share.partial]) <= MAX_IN_FLIGHT

    def end(self, number: int, code: int = 0, rest: int = 0) -> None:
        """A worker ends its next share; ``rest`` of its starts stay unfinished."""
        worker = self.worker(number)
        if not self.shares[worker]:
            return
        order = self.shares[worker].pop(0)
        left: dict[str, Any] = {}
        if rest and order.work_item in self.reassigned:
            unfinished = order.starts[-rest:]
            left = {"unfinished_starts": unfinished, "num_partial_samples": len(unfinished)}
        report = WorkItemEnded(work_item=order.work_item, exit_code=code, spans=SPANS, **left)
        item = self.scheduler.on_ended(worker, report)
        if isinstance(item, ShareItem):
            done = self.done[item.node.name]
            done += item.starts
            assert len(done) == len(set(done)), "nothing is generated twice"
        self.receive()

    def end_stage(self, name: str, code: int = 0) -> None:
        """A running stage ends; well only if it can."""
        worker, order = self.stages[name]
        has_inputs = {folder for folder, _ in order.inputs.values()} <= self.committed
        has_all = not order.receives_trajectories or sorted(self.done[name]) == [*range(BATCH)]
        if not code and not (has_inputs and has_all):
            return
        del self.stages[name]
        item = self.scheduler.on_ended(worker, WorkItemEnded(work_item=name, exit_code=code))
        assert isinstance(item, StageItem)
        if code:
            self.add(item.node)
        else:
            self.committed.add(order.output)
            self.ended.append(name)
        self.receive()

    def go_on(self) -> None:
        """All workers are there, and do what they can."""
        for number in WORKERS:
            self.connect(number)
        self.tick()
        for number in WORKERS:
            self.end(number)
        for name in sorted(self.stages):
            self.end_stage(name)

    def load_engines(self) -> None:
        """All workers are there with loaded engines, and the first two rollouts have begun."""
        self.add(*self.nodes)
        for number in WORKERS:
            self.connect(number)
        self.tick()
        self.tick()
        assert all(not self.shares[self.worker(number)][0].starts for number in WORKERS)
        for number in WORKERS:
            self.end(number)
        self.tick()

    def until_reassigned(self) -> GenerateStarts:
        """Generators compute all other shares; return the share that the helper must pass on."""
        self.load_engines()
        while not self.reassigned:
            for number in (FIRST, SECOND):
                self.end(number)
            self.tick()
        shares = self.shares[self.worker(HELPER)]
        while shares[0].work_item not in self.reassigned:
            self.end(HELPER)
        return shares[0]


@pytest.fixture
def elastic(tmp_path: Path) -> Elastic:
    return Elastic(tmp_path)


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["go on", "tick", "end", "reassign", "fail", "stage", "lose", "connect"]),
        st.integers(0, 11),
    ),
    min_size=5,
    max_size=60,
)


@given(st.booleans(), ACTS)
def test_everything_is_done_once_whatever_happens(
    is_ending: bool, acts: list[tuple[str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        pools = Elastic(Path(name))
        if is_ending:
            pools.until_reassigned()
        else:
            pools.load_engines()
        for act, chance in acts:
            number, running = chance % len(WORKERS), sorted(pools.stages)
            match act:
                case "go on":
                    pools.go_on()
                case "tick":
                    pools.tick()
                case "lose":
                    pools.lose(number)
                case "connect":
                    pools.connect(number)
                case "fail":
                    pools.end(number, EXIT_REQUEUE)
                case "stage" if running:
                    pools.end_stage(running[chance % len(running)], code=int(chance < 3))
                case "end" | "reassign":
                    pools.end(number, rest=chance // 3 if act == "reassign" else 0)
        for _ in range(100):
            if pools.scheduler.unfinished:
                pools.go_on()
        assert sorted(pools.ended) == sorted(node.name for node in pools.nodes)
        assert not pools.scheduler.unfinished


def test_a_helper_passes_its_last_samples_to_a_generator(elastic: Elastic) -> None:
    share = elastic.until_reassigned()
    elastic.end(HELPER, rest=1)
    elastic.tick()
    (order,) = [o for n in (FIRST, SECOND) for o in elastic.shares[elastic.worker(n)] if o.partial]
    assert order.partial is not None
    assert (order.starts, order.partial.num_samples) == (share.starts[-1:], 1)
    assert order.partial.worker == elastic.worker(HELPER)
    assert not elastic.shares[elastic.worker(HELPER)][1:], "starts that come back are not for it"


def test_samples_of_a_helper_are_begun_anew_if_no_generator_is_left(elastic: Elastic) -> None:
    share = elastic.until_reassigned()
    elastic.end(HELPER, rest=1)
    elastic.lose(FIRST)
    elastic.lose(SECOND)
    elastic.tick()
    (order,) = elastic.shares[elastic.worker(HELPER)][-1:]
    assert share.starts[-1] in order.starts
    assert order.partial is None


def test_a_helper_generates_for_no_iteration_after_its_next_stage(elastic: Elastic) -> None:
    elastic.load_engines()
    shares = elastic.shares[elastic.worker(HELPER)]
    assert {order.iteration for order in shares} == {0}, "training comes first"


def test_lost_starts_are_assigned_first(elastic: Elastic) -> None:
    elastic.load_engines()
    lost = elastic.shares[elastic.worker(FIRST)][0].starts
    elastic.lose(FIRST)
    elastic.end(SECOND)
    elastic.tick()
    assert elastic.shares[elastic.worker(SECOND)][-1].starts[0] == lost[0]


def test_shares_go_to_workers_with_the_weights_until_they_are_committed(elastic: Elastic) -> None:
    elastic.load_engines()
    for name in ("rollout/0", "rollout/1"):
        while name not in elastic.ended:
            for number in WORKERS:
                elastic.end(number)
            elastic.end_stage(name)
            elastic.tick()
    assert not any(elastic.shares.values()), "nobody has the weights of rollout/2"
    weights, second = "it/0000/sync", elastic.worker(SECOND)
    elastic.scheduler.on_weights(second, weights, "data-a", 0)
    elastic.tick()
    attempts = {order.weights_attempt for order in elastic.shares[second]}
    assert (attempts, elastic.shares[elastic.worker(FIRST)]) == ({"data-a"}, [])
    elastic.end(SECOND, EXIT_REQUEUE)
    elastic.end(SECOND, EXIT_REQUEUE)
    elastic.tick()
    assert not any(elastic.shares.values()), "it lost the weights"
    elastic.committed.add(weights)
    elastic.tick()
    attempts = {order.weights_attempt for order in elastic.shares[elastic.worker(FIRST)]}
    assert attempts == {None}


def test_bad_input_is_not_tried_again_and_failures_are_limited(elastic: Elastic) -> None:
    elastic.load_engines()
    with pytest.raises(InputError, match="rollout/0"):
        elastic.end(FIRST, EXIT_BAD_INPUT)
    elastic.tick()
    with pytest.raises(StageError, match="rollout/0 failed on"):
        for _ in range(MAX_FAILURES + 1):
            elastic.end(FIRST, 1)
            elastic.tick()


def test_shares_of_an_ended_rollout_are_cancelled_and_late_reports_count(elastic: Elastic) -> None:
    elastic.load_engines()
    late = elastic.shares[elastic.worker(FIRST)][0]
    elastic.end_stage("rollout/0", code=1)
    assert not any(order.iteration == 0 for o in elastic.shares.values() for order in o)
    report = WorkItemEnded(work_item=late.work_item, spans=SPANS)
    assert elastic.scheduler.on_ended(elastic.worker(FIRST), report) is not None
    assert elastic.scheduler.on_ended(elastic.worker(FIRST), report) is None


def test_a_dispatch_takes_time_in_proportion_to_the_workers(tmp_path: Path) -> None:
    def calls(generators: int) -> int:
        """Python calls of a dispatch while all generators are busy."""
        config, plan = elastic_experiment()
        rollout = config.rollout.model_copy(update={"batch_size": 4 * generators})
        pools = Pools(config.model_copy(update={"rollout": rollout}), plan, tmp_path)
        first = pools.pools[0]
        pools.pools += [PoolState(0, (), first.resources, i) for i in range(1, generators)]
        pools.committed.add("sft")
        for number in range(len(pools.pools)):
            pools.lease(number)
        pools.add(*[node for node in pools.graph.nodes() if node.name == "rollout/0"])
        for worker, order in pools.dispatch():
            assert isinstance(order, StageOrder)
            pools.scheduler.on_collected(worker, order.node, [])
        for worker, order in pools.dispatch():
            pools.scheduler.on_ended(worker, WorkItemEnded(work_item=order.work_item))
        assert sum(isinstance(order, GenerateStarts) for _, order in pools.dispatch()) > generators
        profile = Profile()
        profile.runcall(pools.dispatch)
        assert not pools.sent
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(160) < 5 * calls(40)


def test_shares_get_smaller_towards_the_end() -> None:
    speeds, pending, sizes = WorkerSpeeds(), 64, []
    while pending:
        sizes.append(speeds.share_size(pending, 0.5))
        pending -= sizes[-1]
    assert (sizes[0], sizes[-1]) == (16, 1)
    assert sizes == sorted(sizes, reverse=True)


def test_a_worker_gets_its_whole_part_if_time_hardly_depends_on_the_size() -> None:
    speeds = WorkerSpeeds()
    for size in (2, 4, 8):
        speeds.record("a", size, 10.0)
    assert speeds.share_size(64, 0.25) == 16


def test_speeds_are_measured_and_unknown_workers_get_the_average() -> None:
    speeds = WorkerSpeeds()
    for _ in range(3):
        speeds.record("slow", 4, 4.0)
        speeds.record("fast", 4, 1.0)
    assert speeds.speeds(["slow", "fast", "new"]) == {"slow": 1.0, "fast": 4.0, "new": 2.5}
    speeds.forget("a")
    assert speeds.speeds(["a"]) == {"a": 1.0}, "nothing is kept of workers that have left"


# Orders of whole stages


def stage_nodes(iteration: int, *stages: str) -> list[StageNode]:
    return [StageNode(stage, iteration) for stage in stages]


def test_a_rollout_does_not_keep_the_one_before_in_memory(
    compose: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """It reads open episodes from disk: the worker would keep all its trajectories for it."""
    pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
    values = compose("cluster=local", "task.carry_over_episodes=true", experiment="cartpole_ppo")
    plan = {"pools": [{"stages": HELD, "devices": {"local": 1}}]}
    pools = Pools(*checked(values, plan), tmp_path)
    pools.lease(0)
    pools.add(*stage_nodes(1, *STAGES), *stage_nodes(2, *STAGES))
    orders = [order for _, order in pools.dispatch()]
    assert all(isinstance(order, StageOrder) for order in orders), "no other worker needs anything"
    inputs = {order.node: order.inputs for order in orders}
    assert inputs["rollout/2"] == {
        "weights": ("it/0001/sync", True),
        "open_episodes": ("it/0001/rollout", False),
    }
    assert inputs["train/1"]["trajectories"] == ("it/0001/rollout", True)


RANKS = {
    "num_chunks": 2,
    "stages": {stage: {"processes": 2} for stage in ("rollout", "inference", "train")},
    "pools": [
        {"stages": HELD[:1], "devices": {"local": 2}},
        {"stages": HELD[1:], "devices": {"local": 2}},
    ],
    "transports": {"rollout -> train": "shared_memory"},
}


def test_each_rank_fetches_from_all_others_that_produce_records(
    compose: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    pools = Pools(*checked(compose("cluster=local", "rollout.batch_size=8"), RANKS), tmp_path)
    pools.lease(0)
    pools.lease(1)
    pools.add(*stage_nodes(0, "rollout", "inference", "train"))
    sent = [*pools.dispatch(), *pools.dispatch()]
    fetches = [(w, order) for w, order in sent if isinstance(order, messages.FetchOutput)]
    found = {(w, order.output, order.producers, order.transport) for w, order in fetches}
    assert len(found) == len(fetches), "each is ordered once"
    rollout, inference = "it/0000/rollout", "it/0000/inference"
    both = ("pool-0-0-r0", "pool-0-0-r1")
    assert found == {
        ("pool-1-0-r0", rollout, both, "socket"),  # by inference
        ("pool-1-0-r1", rollout, both, "socket"),
        ("pool-1-0-r0", rollout, both, "shared_memory"),  # by train
        ("pool-1-0-r1", rollout, both, "shared_memory"),
        ("pool-1-0-r0", inference, ("pool-1-0-r1",), "socket"),
        ("pool-1-0-r1", inference, ("pool-1-0-r0",), "socket"),
    }


def test_success_counts_once_the_primary_rank_reports_it_and_failure_at_once(
    compose: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    pools = Pools(*checked(compose("cluster=local", "rollout.batch_size=8"), RANKS), tmp_path)
    lease, nodes = pools.lease(0), stage_nodes(0, "rollout")
    pools.add(*nodes)
    pools.dispatch()
    first, second = lease.workers()
    ended, failed = (WorkItemEnded(work_item="rollout/0", exit_code=code) for code in (0, 1))
    assert pools.scheduler.on_ended(second, ended) is None
    assert pools.scheduler.is_busy(lease)
    assert pools.scheduler.on_ended("pool-0-9-r0", ended) is None, "of an earlier lease"
    assert pools.scheduler.on_ended(first, ended) is not None
    pools.add(*nodes)
    pools.dispatch()
    assert pools.scheduler.on_ended(second, failed) is not None
    assert not pools.scheduler.unfinished


def test_another_attempt_comes_before_a_running_stage_that_waits_for_it(
    compose: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Its input is read from disk now, so that by itself it would come after all chunks."""
    plan = {"pools": [{"stages": HELD, "devices": {"local": 1}}]}
    pools = Pools(*checked(compose("cluster=local"), plan), tmp_path)
    lease = pools.lease(0)
    pools.add(*stage_nodes(0, *STAGES))
    first = {order.node: order.position for _, order in pools.dispatch()}
    worker = lease.primary_worker
    pools.scheduler.on_ended(worker, WorkItemEnded(work_item="rollout/0"))
    pools.scheduler.on_ended(worker, WorkItemEnded(work_item="reward/0", exit_code=1))
    pools.add(*stage_nodes(0, "reward"))
    (again,) = [order for _, order in pools.dispatch()]
    assert again.node == "reward/0"
    assert not again.inputs["trajectories"][1], "the rollout has ended"
    assert again.position == first["reward/0"] < first["train/0"]


def test_ranks_get_all_stages_of_an_iteration_at_once(
    compose: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    pools = Pools(*checked(compose("cluster=local", "rollout.batch_size=8"), RANKS), tmp_path)
    pools.lease(1)
    pools.now = 0.0
    inference, train = stage_nodes(0, "inference", "train")
    pools.scheduler.add(inference, stage_call(pools.run, pools.graph, inference), 0.0)
    pools.scheduler.dispatch(0.1)
    assert not pools.sent, "train may follow"
    pools.scheduler.add(train, stage_call(pools.run, pools.graph, train), 0.2)
    pools.scheduler.dispatch(0.3)
    (order, *_) = [order for _, order in pools.sent if isinstance(order, messages.RunStages)]
    assert [stage.stage for stage in order.stages] == ["inference", "train"]
