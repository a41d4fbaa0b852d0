"""Production CPUs that a distribution's kernel sees in place of the emulated CPU."""
