"""Questions to a kernel that runs in the emulator and to kprobefs, and the comparison of their answers."""
