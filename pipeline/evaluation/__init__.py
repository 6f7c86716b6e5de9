"""Evaluations of a model on sets of problems: statistics, results, comparison, and their page."""
