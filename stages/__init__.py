"""The stages of an iteration, and those that run once before the first: they read their inputs,
call the components of :mod:`rlinf`, and write their outputs.

Every driver starts a stage the same way: ``python -m stages NAME --config F --out D``.
"""
