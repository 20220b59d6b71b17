"""Resume: the state of a job's last commit, and the source offsets at that commit."""
