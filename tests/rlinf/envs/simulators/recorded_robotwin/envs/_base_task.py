"""What tasks are made of."""
