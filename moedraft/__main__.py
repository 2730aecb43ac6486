"""`python -m moedraft`: the command line."""

import sys

from moedraft.cli import main

if __name__ == "__main__":
    sys.exit(main())
