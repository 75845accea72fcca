"""``python -m vllm_hotpath``."""

import sys

from vllm_hotpath.cli import main

if __name__ == "__main__":
    sys.exit(main())
