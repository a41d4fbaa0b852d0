"""Benchmarks and analyses that the program offers as commands."""
