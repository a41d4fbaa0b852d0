"""Event triggers: their commands, and what they do to a trace array."""
