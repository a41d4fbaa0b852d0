"""RISC-V: instruction decoding, probe checks, out-of-line execution, code generation.

Other layers use RISCV64 and RISCV64I of arch.py through the hooks of Arch. Code that analyses text without a
kernel also uses probe_checks.py. As in all of arch, no module takes a lock.
"""
