"""Channels: ordered, typed streams of records between two stages or two parts of one."""

INTERFACE_VARIABLE = "RLINF_INTERFACE"
"""Interface that the sockets of a process listen on; the key is ``cluster.network_interface``."""
LOOPBACK = "127.0.0.1"
