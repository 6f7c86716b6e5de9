"""Choosing where stages run: a problem, a prediction for any placement, a search, a bound."""
