//! NVFP4 on the CPU, bit for bit what `kernels/nvfp4.cuh` does: block scale, e2m1 codes and scale layouts.

use crate::fp8::{Bf16, Float16, Fp16, f32_from_e4m3};
use crate::mufu::rcp_approx;

/// Elements that share a scale.
pub const BLOCK: usize = 16;
/// Bytes of a block's codes.
pub const CODE_BYTES: usize = BLOCK / 2;

/// Where the scale of block `col` of `row` lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    Linear,
    Swizzled128x4,
    Swizzled8x4,
}

impl Layout {
    pub const NAMES: [(&'static str, Self); 3] = [
        ("linear", Self::Linear),
        ("swizzled_128x4", Self::Swizzled128x4),
        ("swizzled_8x4", Self::Swizzled8x4),
    ];

    /// Rows and columns of a tile, which the sizes are padded to.
    const fn tile(self) -> (i64, i64) {
        match self {
            Self::Linear => (1, 1),
            Self::Swizzled128x4 => (128, 4),
            Self::Swizzled8x4 => (8, 4),
        }
    }

    /// Padded rows and columns of the scales of `rows` rows with `cols` blocks each.
    pub const fn padded(self, rows: i64, cols: i64) -> (i64, i64) {
        let (r, c) = self.tile();
        ((rows + r - 1) / r * r, (cols + c - 1) / c * c)
    }

    /// Byte offset of a scale; `cols` is the padded number of scales of a row.
    pub fn offset(self, row: usize, col: usize, cols: usize) -> usize {
        match self {
            Self::Linear => row * cols + col,
            Self::Swizzled128x4 => {
                (row / 128 * (cols / 4) + col / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + col % 4
            }
            Self::Swizzled8x4 => (row / 8 * (cols / 4) + col / 4) * 32 + row % 8 * 4 + col % 4,
        }
    }
}

/// A 16-bit float that arithmetic rounds to as the GPU does: nearest even, NaN always 0x7FFF.
pub trait Rounded: Float16 {
    fn from_f32(x: f32) -> u16;
}

const NAN_16: u16 = 0x7FFF;

impl Rounded for Bf16 {
    fn from_f32(x: f32) -> u16 {
        if x.is_nan() { NAN_16 } else { half::bf16::from_f32(x).to_bits() }
    }
}

impl Rounded for Fp16 {
    fn from_f32(x: f32) -> u16 {
        if x.is_nan() { NAN_16 } else { half::f16::from_f32(x).to_bits() }
    }
}

/// e4m3 as the hardware converts: as `fp8::e4m3_from_f32`, but NaN loses its sign.
fn scale_byte(x: f32) -> u8 {
    if x.is_nan() { 0x7F } else { crate::fp8::e4m3_from_f32(x) }
}

/// Nearest e2m1, ties to even, saturated to +-6; zeros keep their sign, NaN is +6.
fn e2m1(y: f32) -> u8 {
    if y.is_nan() {
        return 7;
    }
    let sign = u8::from(y.is_sign_negative()) << 3;
    // Each threshold is the middle of two neighbours, and belongs to the one with the even code.
    let code = match y.abs() {
        a if a <= 0.25 => 0,
        a if a < 0.75 => 1,
        a if a <= 1.25 => 2,
        a if a < 1.75 => 3,
        a if a <= 2.5 => 4,
        a if a < 3.5 => 5,
        a if a <= 5.0 => 6,
        _ => 7,
    };
    sign | code
}

/// Quantises a block; returns the byte of its scale.
pub fn quantize_block(x: &[f32; BLOCK], global_scale: f32, codes: &mut [u8; CODE_BYTES]) -> u8 {
    // f32::max ignores NaN; of NaN alone it is NaN.
    let amax = x.iter().fold(f32::NAN, |amax, value| amax.max(value.abs()));
    let byte = scale_byte(global_scale * (amax * rcp_approx(6.0)));
    let stored = f32_from_e4m3(byte);
    let factor = if stored == 0.0 { 0.0 } else { rcp_approx(stored * rcp_approx(global_scale)) };
    for (code, two) in codes.iter_mut().zip(x.as_chunks::<2>().0) {
        *code = e2m1(two[0] * factor) | e2m1(two[1] * factor) << 4;
    }
    byte
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    #[test]
    fn e2m1_is_the_nearest_value_with_ties_to_the_even_code() {
        for code in 0..7_u8 {
            let tie = f32::midpoint(VALUES[usize::from(code)], VALUES[usize::from(code) + 1]);
            assert_eq!(e2m1(tie.next_down()), code);
            assert_eq!(e2m1(tie), (code + 1) & !1);
            assert_eq!(e2m1(tie.next_up()), code + 1);
            assert_eq!(e2m1(-tie.next_up()), (code + 1) | 8);
        }
        assert_eq!([f32::INFINITY, -0.0, f32::NAN, -f32::NAN].map(e2m1), [7, 8, 7, 7]);
    }

    #[test]
    fn layouts_are_permutations_of_the_padded_matrix() {
        for (_, layout) in Layout::NAMES {
            for (rows, cols) in [(1, 1), (5, 5), (33, 29), (130, 12)] {
                let (rows, cols) = layout.padded(rows, cols);
                let mut seen = vec![false; (rows * cols) as usize];
                for row in 0..rows as usize {
                    for col in 0..cols as usize {
                        assert!(!std::mem::replace(&mut seen[layout.offset(row, col, cols as usize)], true));
                    }
                }
            }
        }
    }

    #[test]
    fn special_blocks() {
        let mut codes = [0; CODE_BYTES];
        assert_eq!(quantize_block(&[-0.0; BLOCK], 1.0, &mut codes), 0);
        assert_eq!(codes, [0x88; CODE_BYTES]);
        let mut x = [0.0; BLOCK];
        x[1] = f32::NAN;
        x[2] = -6.0;
        assert_eq!(quantize_block(&x, 1.0, &mut codes), 0x38);
        assert_eq!(codes[..2], [0x70, 0x0F]);
        x[0] = f32::INFINITY;
        assert_eq!(quantize_block(&x, 1.0, &mut codes), 0x7E);
        assert_eq!(quantize_block(&[f32::NAN; BLOCK], 1.0, &mut codes), 0x7F);
        assert_eq!(codes, [0x77; CODE_BYTES]);
    }
}
