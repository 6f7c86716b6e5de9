"""Resident pools as the driver keeps them: jobs, leases, orders, claims of generators."""
