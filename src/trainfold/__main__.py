"""`python -m trainfold` is the command line."""

from trainfold.adapters.cli import main

if __name__ == "__main__":
    main()
