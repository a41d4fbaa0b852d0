"""The public API of kprobefs's own kernel, and the code that creates and connects the kernel's parts."""
