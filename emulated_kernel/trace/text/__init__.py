"""Text of commands and files: words and numbers of commands, printf, error_log, names of tasks.

Other subpackages may use all functions and tables of this subpackage. The contents of error_log and the saved
comms change under the control lock.
"""
