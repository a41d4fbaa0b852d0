"""The daemon: the process that serves a mount."""
