"""x86: decoding, verdicts, out-of-line execution.

From outside: X86_64 and I386 of arch.py; analyses without a kernel take analysis.py, facts.py and verdict.py
too. It takes no lock, as all of arch.
"""
