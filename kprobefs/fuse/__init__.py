"""The FUSE session and its operations: only these modules import fuse."""
