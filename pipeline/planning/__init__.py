"""Planning: measured profiles, cost models, the search for a plan, and a simulator."""
