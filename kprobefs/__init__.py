"""The program: command line, daemon and FUSE adapter.

To read the code, begin with COMMANDS in cli.main. Only the subpackage fuse uses FUSE. A request takes the
mount's control lock. Hazard: the subpackage fuse has locks of its own. No thread may wait for the control
lock while it holds a lock of that subpackage.
"""

__version__ = "1.0.0"
