"""What chooses a plan: measured profiles, models of cost, search, simulation."""
