"""Random cases of many kinds, answered by a distribution's kernel inside the emulator and by ours."""
