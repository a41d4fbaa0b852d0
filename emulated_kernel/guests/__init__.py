"""Guest kernels: kprobefs's own small kernel, and distributions' kernels."""
