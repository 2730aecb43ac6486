"""`moedraft` and `python -m moedraft`: the command line."""

import sys


def start() -> int:
    """Run the process's own arguments; returns the exit code.

    The libraries of the command line are loaded in here, so that an interrupt meanwhile shows no traceback.
    """
    try:
        from moedraft.cli import main
    except KeyboardInterrupt:
        print("Error: interrupted before anything was done.", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(start())
