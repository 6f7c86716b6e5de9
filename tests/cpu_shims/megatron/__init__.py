"""The import hook with which Megatron-Core runs on a CPU."""
