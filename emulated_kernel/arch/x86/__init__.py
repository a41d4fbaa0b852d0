"""x86_64 and i386: instruction decoding, probe checks, out-of-line execution, code generation.

Other layers use X86_64 and I386 of arch.py through the hooks of Arch. Code that analyses text without a
kernel also uses analysis.py, insn_attributes.py and probe_checks.py. As in all of arch, no module takes a
lock.
"""
