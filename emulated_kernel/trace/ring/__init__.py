"""Ring buffers in Linux's layout, which guest code and the host write alike."""
