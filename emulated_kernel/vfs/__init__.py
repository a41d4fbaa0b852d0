"""Files: what processes see of a kernel, and how their requests reach it.

`mount` has Mount, which a front end serves: a table of file systems and a table of open files. `filesystem`
has the interface of both, FileSystem and FileDescription. `control_fs` has ControlFs, the file system of
kprobefs's own files, and GuestCalls, how a guest takes part in their use. `core` has kinds of files and knows
no kernel; `trees` makes tracefs, debugfs and further directories of them, over the objects of the layers
below. The file systems of guests are in `guests`. A new kind of mount is one subclass of FileSystem.
"""
