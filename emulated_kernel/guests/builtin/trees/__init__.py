"""File trees that only kprobefs's own kernel has."""
