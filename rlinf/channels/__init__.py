"""Channels: ordered, typed streams of records between stages, or between parts of a stage."""

INTERFACE_VARIABLE = "RLINF_INTERFACE"
"""Network interface of a process's sockets; the key is ``cluster.network_interface``."""
LOOPBACK = "127.0.0.1"
