"""File trees of mounts of kprobefs's own kernel."""
