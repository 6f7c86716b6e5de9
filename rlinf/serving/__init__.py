"""An OpenAI-compatible HTTP endpoint of an engine."""
