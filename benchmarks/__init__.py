"""Measured figures: ``make bench`` prints them and writes ``benchmarks/results.json``."""
