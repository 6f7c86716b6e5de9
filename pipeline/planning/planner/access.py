"""Which partitions this user may use, by the accounts and QOS that they let in."""

from __future__ import annotations

from collections.abc import Collection

from slurm.inventory import Inventory
from slurm.site import Site


def refused(partition: str, inventory: Inventory, site: Site) -> str:
    """Why jobs of this user do not run in a partition; "" where they do, as far as is known.

    The account and QOS are those that the site file names, or else any that accounting gives.
    """
    rules, own = inventory.partitions[partition], site.of(partition)
    known = inventory.limits.associations if inventory.limits else ()
    accounts = {own.account} if own.account else {a.account for a in known}
    qos = {own.qos} if own.qos else {name for a in known for name in a.qos}
    return _closed("account", accounts, rules.allowed_accounts, rules.denied_accounts) or _closed(
        "QOS", qos, rules.allowed_qos, rules.denied_qos
    )


def _closed(
    what: str, mine: Collection[str], allowed: Collection[str] | None, denied: Collection[str]
) -> str:
    """Slurm looks at those denied only where none are allowed by name; a partition without a rule,
    or a user of whom nothing is known, is no reason."""
    if not mine:
        return ""
    own = ", ".join(sorted(mine))
    if allowed is not None:
        if set(mine) & set(allowed):
            return ""
        return f"it lets in {what} {', '.join(sorted(allowed))} alone, yours: {own}"
    return "" if set(mine) - set(denied) else f"it does not let in {what} {own}"
