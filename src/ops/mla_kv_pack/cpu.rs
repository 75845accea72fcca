//! The CPU implementation: one row (token, head) after the other, rows split over threads.

use std::slice;

use super::Plan;
use crate::fp8::{Bf16, Float16, Fp16, e4m3_from_f32, e4m3_quotient, f32_from_e4m3};
use crate::parallel::for_ranges;
use crate::tensor::{DType, Tensor};

pub fn run(plan: &Plan<'_>) {
    let rows = plan.keys.tokens as u64 * plan.keys.heads as u64;
    let key_bytes = (plan.keys.nope + plan.keys.rope) as usize * plan.k_out.dtype.size();
    let value_out = plan.fp8.as_ref().map_or(0, |fp8| fp8.value_out as usize);
    // Before any output is written, so that a scale is read once for all rows.
    let scale = |tensor: Option<&Tensor>| {
        // SAFETY: a checked scale is one fp32 element on the CPU.
        tensor.map(|t| f32::from_ne_bytes(unsafe { t.data.cast::<[u8; 4]>().read() }))
    };
    let (k_scale, v_scale) =
        plan.fp8.as_ref().map_or((None, None), |fp8| (scale(fp8.k_scale), scale(fp8.v_scale)));

    for_ranges(rows, (key_bytes + value_out) as u64, |range| {
        for row in range {
            let (token, head) =
                ((row / plan.keys.heads as u64) as i64, (row % plan.keys.heads as u64) as i64);
            // SAFETY: the outputs are contiguous with `rows` rows of these widths and apart from every input; each row is
            // visited by one thread. Inputs have the checked shapes with stride 1 along a row.
            unsafe {
                let key = slice::from_raw_parts_mut(plan.k_out.data.add(row as usize * key_bytes), key_bytes);
                let k_nope = source_row(plan.k_nope, token, head, plan.keys.nope);
                let k_pe = source_row(plan.k_pe, token, 0, plan.keys.rope);
                let Some(fp8) = &plan.fp8 else {
                    key[..k_nope.len()].copy_from_slice(k_nope);
                    key[k_nope.len()..].copy_from_slice(k_pe);
                    continue;
                };
                let (key_nope, key_pe) = key.split_at_mut(plan.keys.nope as usize);
                quantize(plan.k_nope.dtype, k_nope, k_scale, key_nope);
                let k_pe_scale = if plan.k_pe.dtype == DType::F8_E4M3 { None } else { k_scale };
                quantize(plan.k_pe.dtype, k_pe, k_pe_scale, key_pe);

                let stored =
                    slice::from_raw_parts_mut(fp8.v_out.data.add(row as usize * value_out), value_out);
                let (stored, padding) = stored.split_at_mut(fp8.value as usize);
                quantize(fp8.v.dtype, source_row(fp8.v, token, head, fp8.value), v_scale, stored);
                padding.fill(0);
            }
        }
    });
}

/// The bytes of `width` elements of an input at a token and head. An input with fewer dimensions ignores the head.
///
/// # Safety
/// `token` and `head` lie in the tensor, which has stride 1 over `width` elements.
unsafe fn source_row(tensor: &Tensor, token: i64, head: i64, width: i64) -> &[u8] {
    if width == 0 {
        return &[];
    }
    let mut offset = token * tensor.byte_stride(0);
    if tensor.shape().len() == 3 {
        offset += head * tensor.byte_stride(1);
    }
    // SAFETY: the caller's promise.
    unsafe {
        slice::from_raw_parts(tensor.data.offset(offset as isize), width as usize * tensor.dtype.size())
    }
}

/// Stores `source`, elements of `dtype`, as e4m3 bytes.
fn quantize(dtype: DType, source: &[u8], scale: Option<f32>, out: &mut [u8]) {
    match (dtype, scale) {
        (DType::F8_E4M3, None) => out.copy_from_slice(source),
        (DType::F8_E4M3, Some(scale)) => {
            for (to, from) in out.iter_mut().zip(source) {
                *to = requotient(*from, scale);
            }
        }
        (DType::BF16, _) => quantize16::<Bf16>(source, scale, out),
        (DType::F16, _) => quantize16::<Fp16>(source, scale, out),
        _ => unreachable!("checked: one of SOURCES"),
    }
}

fn requotient(byte: u8, scale: f32) -> u8 {
    e4m3_quotient(f32_from_e4m3(byte), scale)
}

fn quantize16<F: Float16>(source: &[u8], scale: Option<f32>, out: &mut [u8]) {
    let elements = source.as_chunks::<2>().0.iter().map(|bytes| F::to_f32(u16::from_ne_bytes(*bytes)));
    match scale {
        None => out.iter_mut().zip(elements).for_each(|(to, x)| *to = e4m3_from_f32(x)),
        Some(scale) => out.iter_mut().zip(elements).for_each(|(to, x)| *to = e4m3_quotient(x, scale)),
    }
}
