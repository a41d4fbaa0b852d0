"""Guest kernels as their host uses them: kprobefs's own small kernel, and distributions' kernels."""
