"""Mounts of a distribution's kernel."""
