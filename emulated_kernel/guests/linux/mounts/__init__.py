"""Mounts of a distribution's kernel: its own files, and kprobefs's control files over it."""
