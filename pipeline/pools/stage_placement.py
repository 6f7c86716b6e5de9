"""The placement of stages in the pools of a plan: their ranks, their positions in the schedule of a
device, their chunks, and how their inputs arrive."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.graph import StageNode
from pipeline.plan import COMMITTED_TRANSPORTS, Plan
from pipeline.pools.leases import PoolState
from rlinf.channels.process_group import DATA_PARALLEL_ONLY, ParallelLayout
from rlinf.config import RunConfig
from rlinf.data.record import LARGE_ROW_BYTES
from rlinf.envs import environments
from stages.flow import EVALUATE


class StagePlacement:
    """The placement of all stages of a run.

    Args:
        pools: the pools of the plan, by their index in it.
    """

    def __init__(self, config: RunConfig, plan: Plan, pools: Sequence[PoolState]) -> None:
        self._plan, self.flow = plan, plan.flow
        self._staleness = config.rollout.staleness
        self.stage_index = {stage: i for i, stage in enumerate(self.flow.stages)}
        self._pool_by_stage = {stage: pools[number] for stage, number in plan.stage_pools().items()}
        self._layouts = {stage: plan.stage_plan(stage).layout for stage in self._pool_by_stage}
        environment = environments.get(config.task.name)
        task = config.task.validate_options(environment.Config, "task")
        self._has_large_steps = environment.max_step_bytes(task) >= LARGE_ROW_BYTES
        self._has_elastic_pool = any(pool.slot is not None for pool in pools)
        self._ranks_by_stage: dict[str, Sequence[int]] = {
            stage: range(
                1 if self._is_collected(stage) or plan.is_single_process(stage) else pool.size
            )
            for stage, pool in self._pool_by_stage.items()
        }
        rollout_stage = str(self.flow.rollout_stage)
        separate_policy = {*self.flow.separate_policy}
        for pool_plan in plan.pools:
            has_both = (
                separate_policy & {*pool_plan.stages} and rollout_stage in pool_plan.stage_ranks
            )
            if has_both and self._pool_by_stage[EVALUATE] is self._pool_by_stage[rollout_stage]:
                # Evaluations run on the ranks of the simulators.
                self._ranks_by_stage[EVALUATE] = pool_plan.stage_ranks[rollout_stage]
            self._ranks_by_stage.update(pool_plan.stage_ranks)
        self.policy_stage = next(iter(separate_policy), None)
        """The stage that serves the policy, if another pool runs the simulators."""
        self._late_stages = self._find_late_stages()

    def pool(self, stage: str) -> PoolState:
        """Return the pool that computes a stage."""
        return self._pool_by_stage[stage]

    def ranks(self, stage: str) -> Sequence[int]:
        """Return the ranks of the pool that compute a stage; the first is the primary rank."""
        return self._ranks_by_stage[stage]

    def layout(self, stage: str) -> ParallelLayout:
        """Return how the ranks of a stage shard a model."""
        return self._layouts[stage] if len(self.ranks(stage)) > 1 else DATA_PARALLEL_ONLY

    def position(self, node: StageNode) -> tuple[int, int, int]:
        """Return (iteration, chunk, stage index), the order in which stages get a shared device
        (:mod:`stages.device_schedule`)."""
        if node.stage in self.flow.setup_stages:
            return (-1, 0, 0)
        if node.stage not in self.stage_index:
            # An evaluation: just before the rollout that uses the same weights.
            return (node.iteration + self._staleness, 0, -1)
        sources = self.flow.stages[node.stage].inputs
        needs_whole_batch = not self.flow.stream_channels & set(sources) and any(
            not s.lag and s.stage in self.stage_index for s in sources.values()
        )
        is_late = needs_whole_batch or node.stage in self._late_stages
        return (node.iteration, self.last_chunk if is_late else 0, self.stage_index[node.stage])

    @property
    def last_chunk(self) -> int:
        """The chunk in the position of a stage that begins after all chunks of the batch."""
        return self._plan.num_chunks

    def num_chunks(self, stage: str) -> int:
        """Return the number of chunks in which a stage processes its batch.

        If no other stage shares the devices, the engine gets the whole batch at once and emits
        samples as they finish. Chunks would be decoded one after another, and each would have a
        long tail.
        """
        others = [s for s in self.flow.stages if s not in self._late_stages and s != stage]
        is_alone = not any(self._share_ranks(stage, other) for other in others)
        gets_whole_batch = stage == self.flow.elastic_stage and is_alone
        return 1 if gets_whole_batch or self.needs_policy(stage) else self._plan.num_chunks

    def needs_policy(self, stage: str) -> bool:
        """Return whether a stage has only simulators, and needs workers that serve the policy.

        Evaluations need them too, unless the plan runs them in another pool than rollouts.
        """
        rollout_stage = str(self.flow.rollout_stage)
        is_client = stage in (rollout_stage, EVALUATE)
        return (
            self.policy_stage is not None
            and is_client
            and self.pool(stage) is self.pool(rollout_stage)
        )

    def only_collects(self, stage: str) -> bool:
        """Return whether a stage only collects the samples of generators."""
        return self._has_elastic_pool and stage == self.flow.elastic_stage

    def transport(self, source: str, target: str, default: str) -> str:
        """Return how the output of one stage gets to another."""
        return self._plan.transports.get(f"{source} -> {target}", default)

    def is_streamed(self, source: str, target: str) -> bool:
        """Return whether an output is sent live, and not read from committed files."""
        is_large = self._has_large_steps and source == self.flow.rollout_stage
        default = "file" if is_large else "socket"
        return self.transport(source, target, default) not in COMMITTED_TRANSPORTS

    def reads_own_shard(self, source: str, target: str) -> bool:
        """Return whether each process of a stage reads its shard of the weights from the published
        files: the trainer has several processes and the plan names no transport."""
        is_trainer = self.flow.all_stages[target].holds == "trainer"
        is_sharded = is_trainer and len(self.ranks(target)) > 1
        return is_sharded and f"{source} -> {target}" not in self._plan.transports

    def _is_collected(self, stage: str) -> bool:
        """Return whether one process collects what generators produce for a stage."""
        return self._has_elastic_pool and self.flow.all_stages[stage].elastic

    def _find_late_stages(self) -> frozenset[str]:
        """Return stages that begin after all chunks of the batch have passed the earlier stages.

        Such a stage needs all ranks of its pool, while each earlier stage uses only some: between
        two chunks it would block the earlier stages. Stages that depend on it are late too.
        """
        late = set[str]()
        for stage, spec in self.flow.stages.items():
            earlier = list(self.flow.stages)[: self.stage_index[stage]]
            # Stages that the plan restricts to some ranks, among them ranks of this stage.
            restricted = {
                s
                for pool in self._plan.pools
                for s in pool.stage_ranks
                if self._share_ranks(s, stage)
            }
            in_loop = restricted & self.stage_index.keys()
            blocks_earlier = stage not in restricted and bool(in_loop) and in_loop <= set(earlier)
            depends_on_late = any(s.stage in late and not s.lag for s in spec.inputs.values())
            if blocks_earlier or depends_on_late:
                late.add(stage)
        return frozenset(late)

    def _share_ranks(self, a: str, b: str) -> bool:
        has_common_rank = not {*self.ranks(a)}.isdisjoint(self.ranks(b))
        return self.pool(a) is self.pool(b) and has_common_rank
