"""The resident worker of a pool: it executes orders, and exchanges records and weights."""
