"""Time the KDA decode against the floor of its state traffic and vLLM's kernel; write a results page."""

import sys

from common import main

if __name__ == "__main__":
    sys.exit(main("kda_decode", __doc__ or ""))
