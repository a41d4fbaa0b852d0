"""Errors, terminals, mount points and running daemons: code that commands and the daemon share."""
