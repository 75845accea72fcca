//! Approximate instructions of the GPU, bit for bit.
//!
//! The hardware interpolates by quadratics over equal segments of the mantissa, in fixed point and with a truncated
//! square. The tables were made from all mantissas tabulated on an H200: docs/kernels/nvfp4_quant.md.

const SIGN: u32 = 0x8000_0000;
const INFINITY: u32 = 0x7F80_0000;
const SMALLEST_NORMAL: u32 = 0x0080_0000;
const NAN: u32 = 0x7FFF_FFFF;
const MANTISSA: u32 = 0x007F_FFFF;

/// Little-endian: for each segment constant, linear and quadratic coefficient (i32); what truncation takes from each
/// square (u8); mantissas where the rest is one off, shifted left by one, odd where the result is one too large (u32).
struct Table {
    bytes: &'static [u8],
    /// Bits of the position in a segment.
    bits: u32,
}

const SEGMENTS: usize = 128;
const COEFFICIENT_BYTES: usize = SEGMENTS * 12;
/// Fraction bits of the sum; the constant coefficients have 4.
const FRACTION: u32 = 18;
/// The bits of 0.5 less the integer 2^23 that stands for it.
const HALF: u32 = 0x3F00_0000 - SMALLEST_NORMAL;

static RCP: Table = Table { bytes: include_bytes!("mufu/rcp.bin"), bits: 16 };
static RSQRT: Table = Table { bytes: include_bytes!("mufu/rsqrt.bin"), bits: 17 };

impl Table {
    fn word(&self, offset: usize) -> [u8; 4] {
        *self.bytes[offset..].first_chunk().expect("the table has this word")
    }

    /// The bits of the result, which lies in (0.5, 1], at position `index` of all segments.
    fn lookup(&self, index: u32) -> u32 {
        let positions = 1_usize << self.bits;
        let (segment, x) = ((index >> self.bits) as usize, index as usize & (positions - 1));
        let coefficient = |k: usize| i64::from(i32::from_le_bytes(self.word(segment * 12 + 4 * k)));
        let square = ((x as i64 * x as i64) >> (2 * self.bits - FRACTION))
            - i64::from(self.bytes[COEFFICIENT_BYTES + x]);
        let linear = (coefficient(1) * x as i64) << (FRACTION - self.bits);
        let sum = (coefficient(0) << (FRACTION - 4)) + linear + coefficient(2) * square;
        (sum >> FRACTION) as u32 + HALF + self.correction(index, COEFFICIENT_BYTES + positions)
    }

    /// 1 or -1 (modulo 2^32) for the listed mantissas.
    fn correction(&self, index: u32, list: usize) -> u32 {
        let (mut low, mut high) = (list / 4, self.bytes.len() / 4);
        while low < high {
            let middle = usize::midpoint(low, high);
            let entry = u32::from_le_bytes(self.word(middle * 4));
            match (entry >> 1).cmp(&index) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
                std::cmp::Ordering::Equal => return if entry & 1 == 0 { 1 } else { u32::MAX },
            }
        }
        0
    }
}

/// `rcp.approx.ftz.f32`: subnormal operands and results are zeros of their sign.
pub fn rcp_approx(x: f32) -> f32 {
    let (sign, magnitude) = (x.to_bits() & SIGN, x.to_bits() & !SIGN);
    let bits = match magnitude {
        0..SMALLEST_NORMAL => sign | INFINITY,
        SMALLEST_NORMAL..INFINITY => {
            let exponent = (magnitude >> 23) as i32 - 127;
            let scaled = RCP.lookup(magnitude & MANTISSA) as i32 - (exponent << 23);
            sign | if scaled < SMALLEST_NORMAL as i32 { 0 } else { scaled as u32 }
        }
        INFINITY => sign,
        _ => NAN,
    };
    f32::from_bits(bits)
}

/// `rsqrt.approx.f32`. Subnormal operands are scaled before.
pub fn rsqrt_approx(x: f32) -> f32 {
    let bits = x.to_bits();
    let bits = match bits {
        0 => INFINITY,
        SIGN => SIGN | INFINITY,
        1..SMALLEST_NORMAL => return rsqrt_approx(x * 16_777_216.0) * 4096.0,
        SMALLEST_NORMAL..INFINITY => {
            let exponent = (bits >> 23) as i32 - 127;
            let half = exponent.div_euclid(2);
            let odd = (exponent - 2 * half) as u32;
            (RSQRT.lookup(odd << 23 | bits & MANTISSA) as i32 - (half << 23)) as u32
        }
        INFINITY => 0,
        _ => NAN,
    };
    f32::from_bits(bits)
}

/// `x / (1 + exp(-x))` as the GPU's expf and division give it, for a value of a 16-bit float; exact once rounded to that.
pub fn silu(x: f32) -> f32 {
    x / (1.0 + (-f64::from(x)).exp() as f32)
}

/// The bits of the reciprocals of 1 to 2 in steps of 2^-23.
pub fn reciprocals() -> Vec<u8> {
    (0..=MANTISSA).flat_map(|mantissa| RCP.lookup(mantissa).to_le_bytes()).collect()
}
