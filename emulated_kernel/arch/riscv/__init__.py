"""riscv64: decoding, verdicts, out-of-line execution."""
