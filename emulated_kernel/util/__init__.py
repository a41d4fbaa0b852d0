"""Code that knows nothing about kernels: safe reading, locks, errors, settings."""
