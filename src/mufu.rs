//! The approximate reciprocal, reciprocal square root and exponential of the GPU, bit for bit.
const SIGN: u32 = 0x8000_0000;
const INFINITY: u32 = 0x7F80_0000;
const SMALLEST_NORMAL: u32 = 0x0080_0000;

/// `rcp.approx.ftz.f32`: subnormal operands and results are zeros of their sign.
pub fn rcp_approx(x: f32) -> f32 {
    let (sign, magnitude) = (x.to_bits() & SIGN, x.to_bits() & !SIGN);
    let bits = match magnitude {
        0..SMALLEST_NORMAL => sign | INFINITY,
        SMALLEST_NORMAL..INFINITY => {
            let exponent = (magnitude >> 23) as i32 - 127;
            let of_mantissa = (1.0 / f32::from_bits(magnitude & 0x7F_FFFF | 0x3F80_0000)).to_bits();
            let scaled = of_mantissa as i32 - (exponent << 23);
            sign | if scaled < SMALLEST_NORMAL as i32 { 0 } else { scaled as u32 }
        }
        INFINITY => sign,
        _ => 0x7FFF_FFFF,
    };
    f32::from_bits(bits)
}
pub fn rsqrt_approx(x: f32) -> f32 {
    (1.0 / f64::from(x).sqrt()) as f32
}
pub fn silu(x: f32) -> f32 {
    x / (1.0 + (-f64::from(x)).exp() as f32)
}
