"""Booting a distribution's kernel, and snapshots of a booted kernel."""
