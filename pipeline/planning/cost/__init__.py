"""The cost model: seconds, bytes and prices of a stage on GPUs, as pure functions."""
