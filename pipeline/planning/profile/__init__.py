"""The profile: measured costs of an experiment's stages on each kind of device."""
