//! The convolution's tensors, each of which may come as one tensor of q, k and v or as three.

use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::{DIM, TAPS, check_cache, check_vector};
use crate::dlpack::Arguments;
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};

/// q, k or v of an argument that may come as one tensor of all three: where its first element is.
pub type Three = [*mut u8; 3];

/// Strides in elements.
pub struct Conv {
    pub x: Three,
    pub x_row: [i64; 3],
    pub x_dtype: DType,
    pub weight: Three,
    pub weight_channel: i64,
    pub weight_tap: i64,
    pub weight_dtype: DType,
    pub bias: Option<Three>,
    pub state: Three,
    pub state_slot: [i64; 3],
    pub state_channel: i64,
    pub state_tap: i64,
}

/// One tensor of q, k and v together, or three.
pub struct Parts {
    tensors: [Tensor; 3],
    count: usize,
}

impl Parts {
    pub fn read<'py>(
        arguments: &mut Arguments<'py>,
        op: &'static str,
        name: &'static str,
        object: &Bound<'py, PyAny>,
    ) -> Result<Self> {
        let mut parts = Self { tensors: [const { Tensor::unset("", "") }; 3], count: 1 };
        for tensor in &mut parts.tensors {
            *tensor = Tensor::unset(op, name);
        }
        if !object.is_instance_of::<PyList>() && !object.is_instance_of::<PyTuple>() {
            arguments.read(object, &mut parts.tensors[0])?;
            return Ok(parts);
        }
        let items: Vec<Bound<'py, PyAny>> = object.try_iter()?.collect::<PyResult<_>>()?;
        if items.len() != 3 {
            return Err(Error::Value {
                op,
                argument: name,
                expected: "one tensor, or three of q, k and v".into(),
                got: format!("{} tensors", items.len()),
            });
        }
        parts.count = 3;
        for (tensor, item) in parts.tensors.iter_mut().zip(&items) {
            arguments.read(item, tensor)?;
        }
        Ok(parts)
    }

    pub fn given(&self) -> &[Tensor] {
        &self.tensors[..self.count]
    }

    pub fn first(&self) -> &Tensor {
        &self.tensors[0]
    }

    /// The pointers to q, k and v. In one tensor, they lie `step` elements apart.
    pub fn pointers(&self, step: i64) -> Three {
        std::array::from_fn(|part| {
            if self.count == 3 {
                self.tensors[part].data
            } else {
                let bytes = part as i64 * step * self.tensors[0].dtype.size() as i64;
                self.tensors[0].data.wrapping_offset(bytes as isize)
            }
        })
    }

    pub fn strides(&self, dim: usize) -> [i64; 3] {
        std::array::from_fn(|part| self.tensors[if self.count == 3 { part } else { 0 }].stride(dim))
    }
}

impl Conv {
    pub fn check(
        x: &Parts,
        weight: &Parts,
        bias: Option<&Parts>,
        state: &Parts,
        tokens: i64,
        heads: i64,
        columns: i64,
    ) -> Result<Self> {
        let channels = heads * DIM;
        let x_dtype = x.first().dtype;
        for tensor in x.given() {
            tensor.expect_dtype(&[DType::BF16, DType::F16])?;
            if tensor.dtype != x_dtype {
                return Err(tensor.type_error(format!("dtype {x_dtype} (that of q)")));
            }
            let width = if x.count == 3 { channels } else { 3 * channels };
            tensor.expect_shape(&[tokens, width], "tokens, channels of q, k and v")?;
            tensor.expect_last_stride_1()?;
            tensor.expect_aligned(x_dtype.size())?;
        }

        let weight_dtype = weight.first().dtype;
        for tensor in weight.given() {
            if weight.count == 3 {
                tensor.expect_dtype(&[DType::F32, x_dtype])?;
                if tensor.dtype != weight_dtype {
                    return Err(tensor.type_error(format!("dtype {weight_dtype} (that of q's)")));
                }
                if tensor.shape() != [channels, 1, TAPS] && tensor.shape() != [channels, TAPS] {
                    return Err(
                        tensor.value_error(format!("shape [{channels}, 1, {TAPS}] or [{channels}, {TAPS}]"))
                    );
                }
            } else {
                tensor.expect_dtype(&[DType::F32])?;
                tensor.expect_shape(&[3, TAPS, channels], "q, k and v; taps; channels")?;
            }
            tensor.expect_contiguous()?;
            tensor.expect_aligned(weight_dtype.size())?;
        }
        let (weight_channel, weight_tap) = if weight.count == 3 { (TAPS, 1) } else { (1, channels) };

        if let Some(bias) = bias {
            for tensor in bias.given() {
                let elements = if bias.count == 3 { channels } else { 3 * channels };
                check_vector(tensor, elements, "channels", &[weight_dtype])?;
            }
        }

        let (state_channel, state_tap) = (state.strides(1)[0], state.strides(2)[0]);
        for tensor in state.given() {
            if tensor.dtype != x_dtype {
                return Err(tensor.type_error(format!("dtype {x_dtype} (that of x)")));
            }
            tensor.expect_rank(&["slots", "channels", "columns"])?;
            let width = if state.count == 3 { channels } else { 3 * channels };
            if tensor.shape()[1] != width || tensor.shape()[2] < columns {
                return Err(tensor.value_error(format!("shape [slots, {width}, {columns} or more]")));
            }
            if tensor.shape()[0] > 0 && (tensor.stride(1), tensor.stride(2)) != (state_channel, state_tap) {
                return Err(tensor.value_error("the channel and column strides of q's"));
            }
            check_cache(tensor)?;
        }
        Ok(Self {
            x: x.pointers(channels),
            x_row: x.strides(0),
            x_dtype,
            weight: weight.pointers(TAPS * channels),
            weight_channel,
            weight_tap,
            weight_dtype,
            bias: bias.map(|bias| bias.pointers(channels)),
            state: state.pointers(channels * state_channel),
            state_slot: state.strides(0),
            state_channel,
            state_tap,
        })
    }
}
