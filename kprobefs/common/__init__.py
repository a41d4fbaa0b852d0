"""Errors, terminals, mount points and running daemons, for commands and daemon."""
