"""Time the MLA key and value pack against the copy floor, torch and vLLM's kernels; write a results page."""

import sys

from common import main

if __name__ == "__main__":
    sys.exit(main("mla_kv_pack", __doc__ or ""))
