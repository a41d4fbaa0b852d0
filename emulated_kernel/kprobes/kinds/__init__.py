"""Kinds of probes on top of kprobes and return hooks: kretprobe, fprobe, jprobe; and rings that record hits.

All of them are for users. They register under the control lock, as a kprobe is registered.
"""
