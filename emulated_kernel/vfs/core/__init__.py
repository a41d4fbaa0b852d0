"""Files as small objects, like kernfs nodes: functions that a node holds generate the file's content.

A NodeTree finds nodes by their paths and raises Linux's errno for operations that a node does not support.
Opening a node creates an OpenFile, the only object that knows positions, ends and partial reads. `seq_file`
contains the kinds of files: lists of records, single values, commands and streams. No module of this
subpackage depends on a kernel.
"""
