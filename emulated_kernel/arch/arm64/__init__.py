"""arm64: instruction decoding, probe checks, out-of-line execution and emulation.

Other layers use Arm64 of arch.py through the hooks of Arch. As in all of arch, no module takes a lock.
"""
