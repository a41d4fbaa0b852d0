"""arm64: instruction decoding, probe checks, out-of-line execution, emulation and code generation.

Other layers use the class Arm64 of arch.py through the hooks of Arch. As in all of the subpackage arch, no
module takes a lock.
"""
