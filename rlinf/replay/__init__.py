"""Replay buffers of transitions, and offline data."""
