"""`python -m theodolite` is the `theodolite` command."""

from theodolite.cli.app import main

if __name__ == "__main__":
    main()
