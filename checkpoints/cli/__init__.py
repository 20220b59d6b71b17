"""The `keyfold` command. The script calls `main`."""
