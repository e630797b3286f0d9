"""`python -m theodolite` is the `theodolite` command."""

from theodolite.cli import main

if __name__ == "__main__":
    main()
