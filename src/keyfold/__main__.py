"""`python -m keyfold`: the `keyfold` command of this interpreter."""

from keyfold.checkpoints.cli.main import main

if __name__ == "__main__":
    main()
