"""A distribution's own kernel: found, unpacked, and read as that kernel reads itself. x86_64 alone."""
