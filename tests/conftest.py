"""What all tests share: one thread, no network, small runs in temporary folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

from rlinf import package_paths, user_code
from tests.cpu_shims import use_cpu_shims
from tests.environments import mark_backends

package_paths.add_to_sys_path()
use_cpu_shims()
# How long an example takes depends on what else the machine does.
settings.register_profile("rlinf", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rlinf")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests on a Slurm go to one worker, others file by file.

    Not by marks: the nodes of pytest 9.2 ignore the names that xdist 3.8 gives to those marked.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "cluster" if Path(file).parent.name == "cluster" else file

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that workers end at about the same time."""
    mark_backends(items)
    here = Path(__file__).parent
    items.sort(key=lambda item: (item.path.parent.name != "cluster", item.path.parent != here))


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny run, undisturbed, in one process. Tests copy what they change."""
    from pipeline.commands.experiment import compose as hydra_compose
    from pipeline.commands.experiment import run_experiment

    root = tmp_path_factory.mktemp("reference")
    run_experiment(
        hydra_compose(["experiment=arithmetic_grpo", f"++run.root={root}", *QUIET, *TINY])
    )
    return root / "tiny"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The wheel in an environment of its own: :class:`tests.wheel.Installed`."""
    from tests.wheel import install

    return install(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(autouse=True)
def no_user_code() -> None:
    """Parts that one test names by ``module:Class`` make no user code of the next test's."""
    for known in (user_code._components, user_code._packages, user_code._folders):
        known.clear()


@pytest.fixture
def undrawn() -> Iterator[None]:
    """Runs that a test drives in its own process end without a report."""
    from tests.pipeline.helpers import no_report

    with no_report():
        yield


@pytest.fixture
def compose(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Composed values of a tiny arithmetic run below a temporary folder, with overrides."""
    from pipeline.commands.experiment import compose as hydra_compose

    def make(*overrides: str, experiment: str = "arithmetic_grpo") -> dict[str, Any]:
        tiny = TINY if experiment == "arithmetic_grpo" else []
        return hydra_compose(
            [
                f"experiment={experiment}",
                f"++run.root={tmp_path}",
                *QUIET,
                *tiny,
                *(f"++{word}" if "." in word.split("=")[0] else word for word in overrides),
            ]
        )

    return make


QUIET = ["++log.trackers=[]"]
TINY = [
    "++run.name=tiny",
    "iterations=2",
    "++model.hidden=32",
    "++model.layers=2",
    "++model.heads=2",
    "++model.kv_heads=1",
    "++model.intermediate=64",
    "++sft.max_steps=3",
    "++sft.batch_size=16",
    "++sft.eval_every=2",
    "++rollout.batch_size=4",
    "++rollout.group_size=4",
    "++rollout.horizon=6",
    "++evaluate.samples=8",
    "++evaluate.every=1",
    "++algorithm.filter_zero_variance_groups=false",
    # A model that has learnt nothing earns no reward: without these its gradient would be zero.
    "++algorithm.entropy_coeff=0.1",
    "++optimizer.lr=1e-2",
]
"""A run of a few seconds that goes through every stage."""
