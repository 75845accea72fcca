//! The one error type of the crate and how it becomes a Python exception.

use pyo3::PyErr;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A dtype, or an object that is no tensor. `TypeError` in Python.
    #[error("{op}: {argument}: expected {expected}, got {got}")]
    Type { op: &'static str, argument: &'static str, expected: String, got: String },

    /// A shape, stride, alignment, device, overlap or number. `ValueError` in Python.
    #[error("{op}: {argument}: expected {expected}, got {got}")]
    Value { op: &'static str, argument: &'static str, expected: String, got: String },

    /// This build cannot run the op on that device. `RuntimeError` in Python.
    #[error("{op}: {reason}")]
    Unsupported { op: &'static str, reason: String },

    /// A CUDA driver call failed. `RuntimeError` in Python.
    #[error("{op}: {call} failed: {name} ({code}): {text}")]
    Cuda { op: &'static str, call: &'static str, code: u32, name: String, text: String },

    /// An exception that Python code called from here has raised.
    #[error("{0}")]
    Python(#[from] PyErr),
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        match error {
            Error::Type { .. } => PyTypeError::new_err(error.to_string()),
            Error::Value { .. } => PyValueError::new_err(error.to_string()),
            Error::Unsupported { .. } | Error::Cuda { .. } => PyRuntimeError::new_err(error.to_string()),
            Error::Python(inner) => inner,
        }
    }
}
