"""Segments: files of consecutive blocks, each an Arrow record batch with a checksum."""
