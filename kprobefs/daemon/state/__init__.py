"""State that outlives a daemon: definitions, counts and trace records in the --state directory."""
