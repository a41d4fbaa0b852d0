"""The trees, as nested literals: name, mode, what a read shows, what a write does.

The files hold the kernel's components and live as long as these. The directory of an event, a group or an
instance is made again for another object of the same name. To add a file, add a row.
"""
