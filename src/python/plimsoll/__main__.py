"""The command `plimsoll`, as it comes with the package."""

import sys

from . import _plimsoll


def main() -> int:
    """Runs the command with the arguments of the process."""
    return _plimsoll.command(["plimsoll", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
