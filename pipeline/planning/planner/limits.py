"""What accounting and partitions allow this user's jobs: the check of ``rlinf run``, beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipeline.launch import ClusterConfig, check_quotas, numbers, plan_jobs, settled_on
from pipeline.plan import Plan, StagePlan
from pipeline.planning.planner.asked import of_devices
from pipeline.planning.profile.kinds import Kind
from rlinf.errors import PlanError
from slurm.inventory import Inventory
from slurm.jobs import Resources
from slurm.quotas import Quotas, Shared, quotas_of
from slurm.site import Site


@dataclass(frozen=True)
class Allowance:
    """What is allowed in one partition, under the account and QOS of the site file."""

    quotas: Quotas = field(default_factory=Quotas)
    account: str | None = None
    qos: str | None = None
    longest: tuple[int, str] | None = None
    """Minutes of a job, and who says so; None: no limit."""
    devices: int | None = None
    """Of a job; None: all there are."""
    refused: str = ""
    """Why a job has no more of them; with 0 devices why none runs."""
    together: Mapping[Shared, int] = field(default_factory=dict)
    """Limits on what all jobs have together, and how much of it a device takes; of a limit on jobs
    a job."""

    def why_not(self, needs: StagePlan, key: str) -> str:
        """Why a job that asks for this never runs; "" where it may."""
        try:
            self.quotas.check(self._resources(needs), key)
        except PlanError as error:
            return str(error)
        return ""

    def of_kind(self, kind: Kind) -> Allowance:
        """The same, with what it comes to in jobs of a kind of device."""
        most, refused = kind.nodes * kind.devices_per_node, ""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            why = self.why_not(of_devices([kind], middle), f"a job on {kind.name}")
            low, high, refused = (low, middle, why) if why else (middle, high, refused)
        one = self._resources(of_devices([kind], 1))
        (shared,) = self.quotas.shared(one)
        return Allowance(
            self.quotas,
            self.account,
            self.qos,
            self.quotas.longest(one),
            low if refused else None,
            refused,
            shared,
        )

    def unlimited(self) -> Allowance:
        """The same without what it comes to in jobs as the planner asks for them; minutes do not
        depend on that."""
        return replace(self, devices=None, refused="", together={})

    def of_job(self, needs: StagePlan, devices: int) -> Allowance:
        """The same, with how much of what jobs have together a device of a given job takes."""
        (shared,) = self.quotas.shared(self._resources(needs))
        each = {limit: n if limit.key == "jobs" else n // devices for limit, n in shared.items()}
        return replace(self, together=each)

    def _resources(self, needs: StagePlan) -> Resources:
        return numbers(needs, account=self.account, qos=self.qos)


def admitted(plan: Plan, cluster: ClusterConfig, inventory: Inventory) -> Plan:
    """A plan with what the cluster tells of it, as ``rlinf run`` has it, if accounting allows it.

    Raises:
        PlanError: it does not; names the key of the plan and the limit.
    """
    plan = settled_on(plan, inventory.partitions)
    check_quotas(plan, plan_jobs(plan, cluster), quotas_of(inventory))
    return plan


def allowance(quotas: Quotas, site: Site, kind: Kind) -> Allowance:
    """What jobs on a kind of device are allowed."""
    own = site.of(kind.partition)
    return Allowance(quotas, own.account, own.qos).of_kind(kind)
