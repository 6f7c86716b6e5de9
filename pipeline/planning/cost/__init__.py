"""The cost model: what a stage takes on GPUs, in seconds, bytes and money. Pure functions."""
