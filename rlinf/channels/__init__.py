"""Channels: ordered, typed streams of records between two stages or two parts of one."""
