"""Time the NVFP4 ops against a copy of their bytes and the unfused chain; write a results page."""

import sys

from common import main

if __name__ == "__main__":
    sys.exit(main("nvfp4_quant", __doc__ or ""))
