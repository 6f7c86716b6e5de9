"""Weights on their way from the trainer to the engines: versions, deltas and transports."""
