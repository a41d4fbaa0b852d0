"""Where unicorn differs from a CPU: looked for and checked at each start, one function a deviation.

bench.py runs pieces of code and has what both kinds of CPUs are checked for; x86.py and riscv.py have the
rest.
"""
