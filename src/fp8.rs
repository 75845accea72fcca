//! FP8 e4m3 ("fn": no infinities) as every op stores it, bit for bit what `kernels/common.cuh` does.

use half::{bf16, f16};

/// The largest finite magnitude, 448.
const MAX: u8 = 0x7E;
const NAN: u8 = 0x7F;
const SIGN: u8 = 0x80;
/// The bits of 2^-6, the smallest normal number, as an fp32.
const SMALLEST_NORMAL: u32 = (127 - 6) << 23;

/// Rounds to nearest even and saturates to +-448, infinities too. NaN is 0x7F with the value's sign.
pub fn e4m3_from_f32(x: f32) -> u8 {
    let bits = x.to_bits();
    let sign = (bits >> 24) as u8 & SIGN;
    let magnitude = bits & 0x7FFF_FFFF;
    if magnitude > 0x7F80_0000 {
        return sign | NAN;
    }
    // 464 is half way between 448 and the 480 that the format lacks; all from there on saturates anyway.
    if magnitude >= 464.0_f32.to_bits() {
        return sign | MAX;
    }
    if magnitude >= SMALLEST_NORMAL {
        // 20 mantissa bits go: add half of the last kept bit, less one where that bit is even.
        let rounded = magnitude + 0x7_FFFF + (magnitude >> 20 & 1);
        return sign | ((rounded >> 20) - ((127 - 7) << 3)) as u8;
    }
    // Subnormal, unit 2^-9: adding 2^14 leaves the value in the last bits of the sum, rounded to nearest even.
    let shifted = f32::from_bits(magnitude) + 16384.0;
    sign | (shifted.to_bits() - 16384.0_f32.to_bits()) as u8
}

/// `e4m3(x / scale)`, fp32 division. NaN, also of 0/0 and of infinities, has the sign that the quotient would have.
pub fn e4m3_quotient(x: f32, scale: f32) -> u8 {
    let quotient = x / scale;
    if quotient.is_nan() {
        let negative = x.is_sign_negative() != scale.is_sign_negative();
        return if negative { SIGN | NAN } else { NAN };
    }
    e4m3_from_f32(quotient)
}

/// The value of an e4m3 byte; exact.
pub fn f32_from_e4m3(byte: u8) -> f32 {
    let sign = u32::from(byte & SIGN) << 24;
    let (exponent, mantissa) = (u32::from(byte >> 3 & 0xF), u32::from(byte & 7));
    let magnitude = if byte & !SIGN == NAN {
        f32::NAN.to_bits()
    } else if exponent == 0 {
        (f32::from(byte & 7) / 512.0).to_bits()
    } else {
        (exponent + 120) << 23 | mantissa << 20
    };
    f32::from_bits(sign | magnitude)
}

/// Any 16-bit float as an exact fp32, NaN with its sign.
pub trait Float16 {
    fn to_f32(bits: u16) -> f32;
}

pub struct Bf16;
pub struct Fp16;

impl Float16 for Bf16 {
    fn to_f32(bits: u16) -> f32 {
        bf16::from_bits(bits).to_f32()
    }
}

impl Float16 for Fp16 {
    fn to_f32(bits: u16) -> f32 {
        f16::from_bits(bits).to_f32()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nearest e4m3 value by search over all of them, ties to the even byte.
    fn nearest(x: f32) -> u8 {
        let sign = if x.is_sign_negative() { SIGN } else { 0 };
        if x.is_nan() {
            return sign | NAN;
        }
        // Beyond 480 every value is as near to 448 as any other; a smaller number keeps the distances exact.
        let target = f64::from(x).abs().min(512.0);
        let distance = |byte: u8| (f64::from(f32_from_e4m3(byte)) - target).abs();
        let best = (0..=MAX)
            .min_by(|a, b| distance(*a).total_cmp(&distance(*b)).then((a & 1).cmp(&(b & 1))))
            .unwrap();
        sign | best
    }

    #[test]
    fn every_16_bit_float_rounds_to_the_nearest_value() {
        for bits in 0..=u16::MAX {
            for x in [Bf16::to_f32(bits), Fp16::to_f32(bits)] {
                assert_eq!(e4m3_from_f32(x), nearest(x), "{x:e} ({bits:#06x})");
            }
        }
    }

    #[test]
    fn fp32_values_around_every_tie_round_to_the_nearest_value() {
        for byte in 0..MAX {
            let tie = f32::midpoint(f32_from_e4m3(byte), f32_from_e4m3(byte + 1));
            for x in [tie.next_down(), tie, tie.next_up()] {
                assert_eq!(e4m3_from_f32(x), nearest(x), "{x:e}");
                assert_eq!(e4m3_from_f32(-x), nearest(-x), "{x:e}");
            }
        }
    }

    #[test]
    fn every_byte_survives_the_round_trip() {
        for byte in 0..=u8::MAX {
            assert_eq!(e4m3_from_f32(f32_from_e4m3(byte)), byte);
            assert_eq!(e4m3_quotient(f32_from_e4m3(byte), 1.0), byte);
        }
    }

    #[test]
    fn nan_quotients_have_the_sign_of_the_quotient() {
        for (x, scale, byte) in [
            (0.0, 0.0, 0x7F),
            (-0.0, 0.0, 0xFF),
            (f32::INFINITY, -f32::INFINITY, 0xFF),
            (f32::NAN, -2.0, 0xFF),
            (-f32::NAN, -2.0, 0x7F),
            (1.0, -f32::NAN, 0xFF),
            (-1.0, 0.0, 0xFE),
        ] {
            assert_eq!(e4m3_quotient(x, scale), byte, "{x} / {scale}");
        }
    }
}
