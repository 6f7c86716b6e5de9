"""Resident pools as seen by the driver: the scheduler of work items, leases and the autoscaler."""
