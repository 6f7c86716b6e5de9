"""Reinforcement-learning post-training as a Slurm-native batch pipeline."""

__version__ = "0.1.0"
