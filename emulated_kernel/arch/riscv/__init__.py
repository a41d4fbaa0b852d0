"""RISC-V: decoding, verdicts, out-of-line execution."""
