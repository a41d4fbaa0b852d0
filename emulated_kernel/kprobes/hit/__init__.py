"""Hits, from the breakpoint back to the probed code."""
