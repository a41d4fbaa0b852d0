"""x86: decoding, verdicts, out-of-line execution."""
