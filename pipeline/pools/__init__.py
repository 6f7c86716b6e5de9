"""Resident pools: their jobs, leases, orders and work queues, as seen by the driver."""
