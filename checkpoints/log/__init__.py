"""The log itself: one writer that appends and commits, readers that follow, and what keeps them apart."""
