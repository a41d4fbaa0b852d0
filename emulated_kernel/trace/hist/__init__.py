"""Histogram triggers: counting hits by key, variables between events, and what follows from them."""
