//! The CPU implementation: one row after the other, rows split over threads. Padding is zeroed before.

use super::{NormPlan, Plan, Quantized};
use crate::fp8::{Bf16, Fp16};
use crate::mufu::{rsqrt_approx, silu};
use crate::nvfp4::{BLOCK, CODE_BYTES, Rounded, quantize_block};
use crate::parallel::for_ranges;
use crate::tensor::{DType, Tensor};

/// Lanes of a warp.
const WARP: usize = 32;
/// Elements of the vectors that a lane of the norm sums.
const VECTOR: usize = 8;

/// One expert's outputs of a quantisation.
#[derive(Clone, Copy)]
struct Sink<'a> {
    to: &'a Quantized<'a>,
    rows: usize,
    /// Blocks of a row, and the scales that a row is padded to.
    cols: usize,
    scale_cols: usize,
    packed: *mut u8,
    scales: *mut u8,
    global_scale: f32,
}

// SAFETY: threads write rows of their own.
unsafe impl Send for Sink<'_> {}
// SAFETY: as above.
unsafe impl Sync for Sink<'_> {}

impl<'a> Sink<'a> {
    /// The outputs of `expert`, each of `rows` rows of `width` elements.
    fn new(to: &'a Quantized<'a>, expert: i64, rows: i64, width: i64) -> Self {
        let cols = width / BLOCK as i64;
        let (scale_rows, scale_cols) = to.layout.padded(rows, cols);
        let scale = if to.global_scale.numel() > 1 { expert } else { 0 };
        // SAFETY: checked: `experts` parts of these sizes; a scale is fp32 on the CPU.
        unsafe {
            Self {
                to,
                rows: rows as usize,
                cols: cols as usize,
                scale_cols: scale_cols as usize,
                packed: to.packed.data.offset((expert * rows * width / 2) as isize),
                scales: to.scales.data.offset((expert * scale_rows * scale_cols) as isize),
                global_scale: f32::from_ne_bytes(read(to.global_scale.data, scale as usize)),
            }
        }
    }

    fn zero_padding_rows(&self) {
        let (rows, _) = self.to.layout.padded(self.rows as i64, 1);
        for row in self.rows..rows as usize {
            for col in 0..self.scale_cols {
                self.store_scale(row, col, 0);
            }
        }
    }

    fn store_scale(&self, row: usize, col: usize, byte: u8) {
        let offset = self.to.layout.offset(row, col, self.scale_cols);
        // SAFETY: inside the padded scales; written by the one thread that has the row.
        unsafe { self.scales.add(offset).write(byte) };
    }

    /// Quantises a row and zeroes its padding columns.
    fn store_row(&self, row: usize, values: &[f32]) {
        for (col, block) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
            // SAFETY: block `col` of a live row.
            let codes = unsafe {
                &mut *self.packed.add((row * self.cols + col) * CODE_BYTES).cast::<[u8; CODE_BYTES]>()
            };
            self.store_scale(row, col, quantize_block(block, self.global_scale, codes));
        }
        for col in self.cols..self.scale_cols {
            self.store_scale(row, col, 0);
        }
    }
}

pub fn run(plan: &Plan<'_>) {
    match plan.x.dtype {
        DType::BF16 => run_as::<Bf16>(plan),
        _ => run_as::<Fp16>(plan),
    }
}

fn run_as<F: Rounded>(plan: &Plan<'_>) {
    let width = plan.width as usize;
    let row_dim = plan.x.shape().len() - 2;
    for expert in 0..plan.experts {
        let sink = Sink::new(&plan.out, expert, plan.rows, plan.width);
        sink.zero_padding_rows();
        // SAFETY: int32 on the CPU, one for each expert.
        let count = plan.row_counts.map(|t| i32::from_ne_bytes(unsafe { read(t.data, expert as usize) }));
        let live = count.map_or(plan.rows, |count| plan.rows.min(i64::from(count.max(0))));
        let base = if row_dim == 1 { expert * plan.x.byte_stride(0) } else { 0 };
        for_ranges(live as u64, (width * 3) as u64, |range| {
            let mut values = vec![0.0_f32; width];
            for row in range {
                let offset = base + row as i64 * plan.x.byte_stride(row_dim);
                // SAFETY: a row of x: `width` elements, twice that with a gate.
                let at = unsafe { plan.x.data.offset(offset as isize) };
                for (i, value) in values.iter_mut().enumerate() {
                    // SAFETY: as above.
                    let x = F::to_f32(u16::from_ne_bytes(unsafe { read(at, i) }));
                    *value = x;
                    if plan.silu {
                        // SAFETY: as above.
                        let up = F::to_f32(u16::from_ne_bytes(unsafe { read(at, width + i) }));
                        *value = F::to_f32(F::from_f32(F::to_f32(F::from_f32(silu(x))) * up));
                    }
                }
                sink.store_row(row as usize, &values);
            }
        });
    }
}

pub fn run_norm(plan: &NormPlan<'_>) {
    match plan.x.dtype {
        DType::BF16 => run_norm_as::<Bf16>(plan),
        _ => run_norm_as::<Fp16>(plan),
    }
}

/// Element `index` behind a pointer, as its bytes.
///
/// # Safety
/// There is such an element.
unsafe fn read<const BYTES: usize>(at: *const u8, index: usize) -> [u8; BYTES] {
    // SAFETY: the caller's promise; bytes have no alignment.
    unsafe { at.cast::<[u8; BYTES]>().add(index).read() }
}

/// Pointer to a row of 16-bit elements.
///
/// # Safety
/// `row` lies in the tensor.
unsafe fn row_of(tensor: &Tensor, row: i64) -> *mut [u8; 2] {
    // SAFETY: the caller's promise.
    unsafe { tensor.data.offset((row * tensor.byte_stride(0)) as isize).cast() }
}

fn run_norm_as<F: Rounded>(plan: &NormPlan<'_>) {
    let width = plan.width as usize;
    let value_of = |bytes: [u8; 2]| F::to_f32(u16::from_ne_bytes(bytes));
    let sinks: Vec<Sink<'_>> = [Some(&plan.out), plan.second.as_ref()]
        .into_iter()
        .flatten()
        .map(|to| Sink::new(to, 0, plan.rows, plan.width))
        .collect();
    for sink in &sinks {
        sink.zero_padding_rows();
    }
    // SAFETY: `width` elements with stride 1.
    let weight: Vec<f32> =
        (0..width).map(|i| F::to_f32(u16::from_ne_bytes(unsafe { read(plan.weight.data, i) }))).collect();
    let mean_of = f64::from(plan.width as i32) as f32;
    for_ranges(plan.rows as u64, (width * 6) as u64, |range| {
        let mut values = vec![0.0_f32; width];
        for row in range.map(|row| row as i64) {
            // SAFETY: rows of tensors of one shape; a row of the residual and of the norm belongs to one thread.
            unsafe {
                let (x, residual) = (row_of(plan.x, row), row_of(plan.residual, row));
                for (i, value) in values.iter_mut().enumerate() {
                    // The sum of two 16-bit floats in fp32, rounded again, is their correctly rounded sum.
                    let sum = F::from_f32(value_of(x.add(i).read()) + value_of(residual.add(i).read()));
                    residual.add(i).write(sum.to_ne_bytes());
                    *value = F::to_f32(sum);
                }
                let factor = rsqrt_approx(sum_of_squares(&values, plan.lanes()) / mean_of + plan.eps);
                for (i, value) in values.iter_mut().enumerate() {
                    let bits = F::from_f32(*value * factor * weight[i]);
                    if let Some(norm) = plan.norm {
                        row_of(norm, row).add(i).write(bits.to_ne_bytes());
                    }
                    *value = F::to_f32(bits);
                }
            }
            for sink in &sinks {
                sink.store_row(row as usize, &values);
            }
        }
    });
}

/// The sum of squares in the order of `kernels/nvfp4_quant.cu`: vectors over lanes, a tree over a warp, warp after warp.
fn sum_of_squares(values: &[f32], lanes: usize) -> f32 {
    let mut partial = vec![0.0_f32; lanes];
    for (index, vector) in values.as_chunks::<VECTOR>().0.iter().enumerate() {
        let mut sum = 0.0_f32;
        for [x, y] in vector.as_chunks::<2>().0 {
            sum += (f64::from(*x) * f64::from(*x) + f64::from(y * y)) as f32;
        }
        partial[index % lanes] += sum;
    }
    let warps = partial.as_chunks::<WARP>().0.iter().map(|warp| {
        let mut tree = *warp;
        let mut step = 1;
        while step < WARP {
            for lane in (0..WARP).step_by(2 * step) {
                tree[lane] += tree[lane + step];
            }
            step *= 2;
        }
        tree[0]
    });
    warps.reduce(|total, warp| total + warp).unwrap_or(0.0)
}
