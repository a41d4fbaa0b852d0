"""Trace arrays: buffers with options, clock, readers and snapshots; the top one and instances."""
