"""The trees of files as nested literals, with the name, mode, read function and write function of each file.

Files refer to the kernel's components, and live as long as the kernel. If an event, a group or an instance is
replaced by another object with the same name, its directory is created again. To add a file, add a row.
"""
