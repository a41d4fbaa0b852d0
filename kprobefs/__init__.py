"""The program: command line, daemon, FUSE adapter.

cli.COMMANDS is where to begin; adapter.py and session_loop.py alone know FUSE. A request takes the mount's
control lock. The locks of adapter.py, loops.py and reserve.py are the program's own: the control lock isn't
waited for while one of them is held.
"""

__version__ = "1.0.0"
