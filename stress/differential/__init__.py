"""Differential test: random accesses to tracefs files on a distribution's kernel and the built-in kernel."""
