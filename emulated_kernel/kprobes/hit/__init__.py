"""Handling of hits, from the breakpoint, jump or call to the continuation of the probed code."""
