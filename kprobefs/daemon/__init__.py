"""The daemon: the process that serves a mount, from its start to the unmount."""
