"""What differs between instruction sets, behind one list of hooks."""
