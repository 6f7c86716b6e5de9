"""A task."""
