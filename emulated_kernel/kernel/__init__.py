"""The public API of kprobefs's own kernel, and the builder behind it."""
