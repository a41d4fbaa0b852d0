"""Benchmarks and analyses: the commands `bench`, `coverage` and `djprobe-analyze`."""
