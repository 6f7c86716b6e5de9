"""Records, trajectories and the batches made of them."""
