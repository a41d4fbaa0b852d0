"""The trees, as nested literals: name, mode, what a read shows, what a write does.

Their files hold the kernel's parts (build.Parts) and live as long as these: a directory of an event,
a group or an instance is made anew for another object of the same name. To add a file, add a row.
"""
