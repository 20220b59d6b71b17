"""Faults: file operations that fail, pause or kill, disks that lose power, machines that run out of room."""
