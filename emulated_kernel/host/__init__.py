"""The host side of the guest: its processes mirrored as tasks, their requests run as system calls."""
