"""Trace events: definitions, fetch arguments, ring buffer, text."""
