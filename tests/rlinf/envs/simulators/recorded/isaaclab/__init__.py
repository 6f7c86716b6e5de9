"""Isaac Lab 2.3, as far as the adapter calls it."""
