"""Files as small objects, like kernfs nodes: each node holds the functions that generate its file's content.

A NodeTree finds nodes by their paths and raises Linux's errno for operations that a node does not support.
Opening a node creates an OpenFile. Only the OpenFile deals with file positions, ends of files and partial
reads. The kinds of files are in `seq_file`, `command_file`, `attribute_file`, `pipe_file` and `edited_file`.
No module of this subpackage depends on a kernel.
"""
