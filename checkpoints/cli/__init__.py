"""The `keyfold` command. `main` is what the script calls."""
