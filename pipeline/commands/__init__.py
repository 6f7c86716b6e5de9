"""The commands of ``rlinf`` and their implementation."""
