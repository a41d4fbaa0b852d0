"""The program: command line, daemon, FUSE adapter."""
