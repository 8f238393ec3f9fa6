"""`python -m skyformer` is the `skyformer` command."""

from skyformer.cli.main import main

if __name__ == "__main__":
    main()
