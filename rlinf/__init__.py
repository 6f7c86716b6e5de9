"""Reinforcement-learning post-training as a Slurm-native batch pipeline.

:mod:`rlinf.api` makes and opens runs from Python; the command ``rlinf`` does from a shell.
"""

__version__ = "0.1.0"
