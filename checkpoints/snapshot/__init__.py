"""Snapshots: a changelog as of a commit, as a self-contained copy; on local disks and object stores."""
