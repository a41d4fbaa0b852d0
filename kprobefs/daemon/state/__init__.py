"""State that outlives a daemon: the --state directory."""
