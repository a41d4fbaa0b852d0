"""Hit handling: from the breakpoint, jump or call back to the probed code."""
