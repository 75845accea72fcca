"""The one table of ops: stem -> public names. A new op is one line here. No torch."""

OPS: dict[str, tuple[str, ...]] = {
    "kda_decode": ("kda_decode", "kda_decode_spec"),
    "mla_kv_pack": ("mla_kv_concat", "mla_kv_concat_quant_fp8"),
    "moe_fp4_preamble": ("moe_fp4_preamble",),
    "moe_router": ("moe_router",),
    "nvfp4_quant": ("nvfp4_quantize", "silu_mul_nvfp4", "add_rms_norm_nvfp4"),
}
