"""The features of this version. Each file has one op's patches, and when they step aside."""

from vllm_hotpath.plugin.features.kda_decode import KDA_DECODE
from vllm_hotpath.plugin.features.mla_kv_pack import K3_DCP_KV_PACK, MLA_KV_PACK
from vllm_hotpath.plugin.features.moe_router import MOE_ROUTER

FEATURES = (MLA_KV_PACK, K3_DCP_KV_PACK, KDA_DECODE, MOE_ROUTER)
