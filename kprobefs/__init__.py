"""The program: command line, daemon, FUSE adapter."""

__version__ = "0.1.0"
