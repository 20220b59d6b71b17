"""Segment files: consecutive blocks, each an Arrow record batch with a checksum."""
