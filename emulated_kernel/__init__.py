"""An emulated Linux-like kernel whose real machine code can be probed; no FUSE, no command line."""
