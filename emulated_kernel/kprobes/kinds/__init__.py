"""Kinds of probes on top of kprobes and return hooks: kretprobe, fprobe and jprobe; and rings of hits.

Users register these probes directly, under the control lock, as they register kprobes.
"""
