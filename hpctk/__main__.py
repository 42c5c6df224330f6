"""`python -m hpctk` is the `hpctk` command."""

import sys

from hpctk.cli import main

if __name__ == "__main__":
    sys.exit(main())
