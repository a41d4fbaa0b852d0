"""riscv64: decoding, verdicts, out-of-line execution.

From outside: RISCV64 and RISCV64I of arch.py; analyses without a kernel take verdict.py too. It takes no
lock, as all of arch.
"""
