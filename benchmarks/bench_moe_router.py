"""Time the MoE router against one read of the gate's weight and vLLM's two kernels; write a results page."""

import sys

from common import main

if __name__ == "__main__":
    sys.exit(main("moe_router", __doc__ or ""))
