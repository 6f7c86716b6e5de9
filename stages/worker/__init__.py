"""The resident worker of a pool: orders, turns, records and weights in memory."""
