"""Files through which processes see a kernel, and the classes that pass the processes' requests to them.

- `mount`: Mount, which a front end serves: a table of file systems and a table of open files.
- `filesystem`: FileSystem and FileDescription, the interfaces of the entries of these two tables.
- `control_fs`: ControlFs, the file system of control files, and GuestCalls, which repeats calls in the guest.
- `core`: nodes and kinds of files, which do not depend on a kernel.
- `trees`: tracefs, debugfs and further directories, built from `core` over the objects of the layers below.

The file systems of guests are in `guests`. A new kind of mount is one subclass of FileSystem.
"""
