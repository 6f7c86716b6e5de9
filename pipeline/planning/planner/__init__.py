"""The planner: placement problems, a predictor of any placement, a search, and lower bounds."""
