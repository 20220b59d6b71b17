"""The manifest: the immutable state of a changelog at a commit, the journal that records it, and its
settings.

    state            the immutable `State`
    partition        its part for one partition
    entries          the kinds of manifest lines, and what each makes of the state
    segment_lines    how a line names segments
    journal          the files: lines with checksums, and the head
    config           the settings: names, defaults, checks
    identity         `changelog.json`
    identity_file    its fields, not interpreted
    idempotence      whether a batch is new, repeated or in conflict
    resolve          the meaning of `at=`, and whether the state there is exact
    source_offsets   positions of a query's sources
    resumption       whether a new query continues where a commit ended

Most of this package is pure. `journal`, `identity` and `identity_file` read and write files.
"""
