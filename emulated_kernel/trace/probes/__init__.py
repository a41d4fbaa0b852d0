"""Dynamic events: definitions parsed, probes registered on the engine, hits turned into records."""
