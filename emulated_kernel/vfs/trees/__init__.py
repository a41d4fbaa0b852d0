"""The trees of files as nested literals, with the name, mode, read function and write function of each file.

Files refer to the kernel's components, and live as long as the kernel. If another object with the same name
replaces an event, a group or an instance, the directory of this name is created again. To add a file, add a
row.
"""
