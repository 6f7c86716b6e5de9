"""Reinforcement-learning post-training as a Slurm-native batch pipeline.

:mod:`rlinf.api` starts and opens runs from Python, and the command ``rlinf`` from a shell.
"""

__version__ = "0.1.0"
