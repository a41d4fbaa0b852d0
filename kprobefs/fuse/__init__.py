"""The FUSE session and its operations. Only this subpackage imports fuse."""
