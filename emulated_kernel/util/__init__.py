"""Helpers that are independent of the kernel: safe reading of files, locks, errors, settings."""
