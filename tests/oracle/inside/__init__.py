"""Comparison of kprobefs with a kernel that runs in the emulator: both are asked the same questions."""
