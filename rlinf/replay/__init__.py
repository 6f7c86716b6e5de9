"""Transitions that are kept: the buffer of a run, and those that were there before."""
