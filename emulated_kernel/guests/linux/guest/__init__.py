"""Tasks, system calls and files of a distribution's kernel."""
