"""Guest kernels, and the code by which the host runs them and reads their data.

builtin/ is for kprobefs's own small kernel, linux/ for distributions' kernels. common/ is shared by both.
"""
