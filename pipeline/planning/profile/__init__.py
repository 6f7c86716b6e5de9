"""The profile: what the stages of an experiment cost on each kind of device, measured."""
