"""`python -m trainfold` is the command line."""

import sys

from trainfold.adapters.cli import main

if __name__ == "__main__":
    sys.exit(main())
