"""The kernel binary: its sources, its build, and the loader that takes an image apart."""
