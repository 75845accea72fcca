"""The features of this version. Each file has one op's patches, and when they step aside."""

from vllm_hotpath.plugin.features.kda_decode import KDA_DECODE
from vllm_hotpath.plugin.features.mla_kv_pack import K3_DCP_KV_PACK, MLA_KV_PACK
from vllm_hotpath.plugin.features.mla_two_stream import MLA_TWO_STREAM
from vllm_hotpath.plugin.features.moe_fp4_preamble import MOE_FP4_PREAMBLE
from vllm_hotpath.plugin.features.moe_router import MOE_ROUTER
from vllm_hotpath.plugin.features.moe_shared_experts import MOE_SHARED_EXPERTS

FEATURES = (
    MLA_KV_PACK,
    K3_DCP_KV_PACK,
    MLA_TWO_STREAM,
    MOE_SHARED_EXPERTS,
    KDA_DECODE,
    MOE_ROUTER,
    MOE_FP4_PREAMBLE,
)
