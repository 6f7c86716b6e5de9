"""Which kinds one job can have nodes of, and what is kept of what they did there."""

from __future__ import annotations

import pytest

from pipeline.plan import StagePlan
from pipeline.planning.profile.build_profile import build_mixtures, mixable_pairs, relative_speeds
from pipeline.planning.profile.device_kinds import list_kinds
from pipeline.planning.profile.measurement import StageTiming, Trial
from slurm.site import SiteConfig
from tests.pipeline.planning.planner import clusters

INVENTORY = clusters.inventory(2)
KINDS = list_kinds(INVENTORY, SiteConfig())


def test_kinds_of_one_partition_are_a_pair_wherever_they_were_measured() -> None:
    """Partition ``gpu`` has the nodes of the two others."""
    for names in (("a100", "h100"), ("gpu:a100", "gpu:h100")):
        (pair,) = mixable_pairs([KINDS[name] for name in names], INVENTORY)
        assert (pair.partition, pair.features) == ("gpu", ("a100", "h100"))


@pytest.mark.parametrize("names", [("a100", "cpu"), ("cpu",), ("a100", "gpu:a100")])
def test_others_are_none(names: tuple[str, ...]) -> None:
    assert mixable_pairs([KINDS[name] for name in names], INVENTORY) == []


def test_a_job_of_a_pair_has_a_node_of_each_and_shares_by_speed() -> None:
    (pair,) = mixable_pairs([KINDS["a100"], KINDS["h100"]], INVENTORY)
    request = StagePlan(
        partition="a100", nodes=2, gpus=1, gpu_type="a100", cpus=4, time_limit_min=7
    )
    made = pair.request_resources(request, relative_speeds([3.0, 1.5]))
    assert (made.partition, made.nodes, made.gpu_type) == ("gpu", 2, None)
    assert made.constraint == "[a100*1&h100*1]"
    assert made.speed_weights == {"a100": 1.0, "h100": 2.0}
    assert (made.gpus, made.time_limit_min) == (1, 7)


def test_warm_repeats_of_the_whole_batch_count() -> None:
    (pair,) = mixable_pairs([KINDS["a100"], KINDS["h100"]], INVENTORY)
    samples = [
        StageTiming(stage="train", samples=8, seconds=9.0, cold=True),
        StageTiming(stage="train", samples=8, seconds=2.0),
        StageTiming(stage="train", samples=8, seconds=3.0),
        StageTiming(stage="train", samples=4, seconds=1.0),
        StageTiming(stage="rollout", samples=8, failure="out of memory"),
    ]
    trial = Trial(key="k", nodes=2, processes=2, samples=tuple(samples))
    (found,) = build_mixtures(pair, (1.0, 2.0), 8, trial)
    assert (found.kinds, found.stage) == (("a100", "h100"), "train")
    assert found.seconds == (2.0, 3.0)
    assert found.batch_share == pytest.approx((1 / 3, 2 / 3))
