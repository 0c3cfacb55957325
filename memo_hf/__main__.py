"""`python -m memo_hf` is the command `memo-hf`, for where its script is not on the path."""

import sys

from memo_hf.cli import main

if __name__ == "__main__":
    sys.exit(main())
