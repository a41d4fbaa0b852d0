"""arm64: instruction decoding, probe checks, out-of-line execution and emulation.

Other layers use the class Arm64 of arch.py through the hooks of Arch. As in all of the subpackage arch, no
module takes a lock.
"""
