"""Whose jobs a partition takes: its accounts and QOS."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from rlinf.errors import PlanError
from slurm.inventory import PartitionInventory

NESTED = (23, 11)
"""From about this version on, accounts that stand below a listed one are meant too (manual page of
slurm.conf); which those are is not asked."""


@dataclass(frozen=True)
class Access:
    """Names in lower case, as Slurm compares them; None: all but those denied."""

    accounts: frozenset[str] | None = None
    denied_accounts: frozenset[str] = frozenset()
    qos: frozenset[str] | None = None
    denied_qos: frozenset[str] = frozenset()

    def check(self, account: str, qos: str, partition: str, where: str) -> None:
        """See that a partition takes jobs of an account and a QOS; "": not known.

        Raises:
            PlanError: it does not.
        """
        for what, name, allowed, denied in (
            ("account", account, self.accounts, self.denied_accounts),
            ("QOS", qos, self.qos, self.denied_qos),
        ):
            # Where some are allowed, Slurm does not look at those denied.
            refused = (
                name.casefold() in denied if allowed is None else name.casefold() not in allowed
            )
            if name and refused:
                only = "" if allowed is None else f", only of {', '.join(sorted(allowed))}"
                raise PlanError(
                    f"{where}.partition: partition {partition!r} takes no jobs of {what} "
                    f"{name}{only}; choose another partition, or another {what} in the site file "
                    "(cluster.site)"
                )


def access_of(partition: PartitionInventory, version: str) -> Access:
    """Of a partition's rules, as a version of Slurm means them."""
    accounts = _names(partition.allowed_accounts)
    denied = frozenset[str]() if accounts is not None else _names(partition.denied_accounts)
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    return Access(
        None if not numbers or numbers >= NESTED else accounts,
        denied or frozenset(),
        _names(partition.allowed_qos),
        _names(partition.denied_qos) or frozenset(),
    )


def _names(listed: Collection[str] | None) -> frozenset[str] | None:
    return None if listed is None else frozenset(name.casefold() for name in listed)
