"""The manifest: the immutable state of a changelog at a commit, the journal that records it, and its
settings.

Most of this package is pure. `journal`, `identity` and `identity_file` read and write files.
"""
