"""Training with Megatron-Core: tensor, sequence, pipeline and expert parallel."""
