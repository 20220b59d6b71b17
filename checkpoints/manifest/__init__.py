"""What a changelog is at a commit: the immutable state, the journal that it is read from, its settings.

Most of it is pure. `journal` and `identity` read and write files.
"""
