"""The public API of kprobefs's own kernel, and its composition root."""
