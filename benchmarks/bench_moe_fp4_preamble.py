"""Time the NVFP4 MoE preamble against a read of the gate's weight and its two parts; write a results page."""

import sys

from common import main

if __name__ == "__main__":
    sys.exit(main("moe_fp4_preamble", __doc__ or ""))
