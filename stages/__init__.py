"""The stages of an iteration and the offline stages: glue between channels and library objects.

Every driver starts a stage the same way: ``python -m stages NAME --config F --out D``.
"""
