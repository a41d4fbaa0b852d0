"""The FUSE session of a mount, and its operations.

Only this subpackage of kprobefs imports fusepy's module fuse.
"""
