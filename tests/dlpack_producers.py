"""DLPack producers that are not torch: capsules built by hand, and wrappers without an exchange API."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_INT64_P = ctypes.POINTER(ctypes.c_int64)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", _INT64_P),
        ("strides", _INT64_P),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)

READ_ONLY, IS_COPIED = 1, 2
_CODES = {np.dtype(np.float16): (2, 16), np.dtype(np.float32): (2, 32), np.dtype(np.uint8): (10, 8)}


class Handmade:
    """A capsule around a numpy array (uint8 is exported as e4m3), whose deleter calls are counted."""

    name = b"dltensor"
    major = 1

    def __init__(
        self,
        array: np.ndarray,
        *,
        null_strides: bool = False,
        byte_offset: int = 0,
        null_data: bool = False,
        lanes: int = 1,
        flags: int = 0,
    ) -> None:
        self.array = array
        self.deletions = 0
        self.exports = 0
        self.keywords: list[set[str]] = []
        self._options = (null_strides, byte_offset, null_data, lanes, flags)

    def _delete(self, _: int | None) -> None:
        self.deletions += 1

    def _destroy(self, capsule: int) -> None:
        if _is_valid(capsule, self.name):
            self._delete(None)

    def _tensor(self) -> _DLTensor:
        null_strides, byte_offset, null_data, lanes, _ = self._options
        array = self.array
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self._strides = (ctypes.c_int64 * array.ndim)(*(step // array.itemsize for step in array.strides))
        code, bits = _CODES[array.dtype]
        return _DLTensor(
            data=None if null_data else array.ctypes.data - byte_offset,
            device_type=1,
            device_id=0,
            ndim=array.ndim,
            code=code,
            bits=bits,
            lanes=lanes,
            shape=ctypes.cast(self._shape, _INT64_P),
            strides=None if null_strides else ctypes.cast(self._strides, _INT64_P),
            byte_offset=byte_offset,
        )

    def _managed(self, deleter: int | None) -> ctypes.Structure:
        return _Managed(tensor=self._tensor(), deleter=deleter)

    def _capsule(self) -> Any:
        self.exports += 1
        self._callbacks = (_DELETER(self._delete), _DESTRUCTOR(self._destroy))
        deleter, destructor = (ctypes.cast(callback, ctypes.c_void_p) for callback in self._callbacks)
        self._kept = self._managed(deleter.value)
        return _new_capsule(ctypes.addressof(self._kept), self.name, destructor)

    def __dlpack__(self, stream: Any = None) -> Any:
        return self._capsule()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class HandmadeVersioned(Handmade):
    """The same with the versioned struct, from a producer that requires ``max_version``."""

    name = b"dltensor_versioned"

    def _managed(self, deleter: int | None) -> ctypes.Structure:
        return _ManagedVersioned(
            major=self.major, minor=0, deleter=deleter, flags=self._options[-1], tensor=self._tensor()
        )

    def __dlpack__(self, *, stream: Any = None, max_version: tuple[int, int] | None = None, **_: Any) -> Any:
        if max_version is None or max_version[0] < 1:
            raise BufferError("this producer has versioned capsules only")
        return self._capsule()


class FutureVersion(HandmadeVersioned):
    major = 2


class WrongName(Handmade):
    name = b"not a tensor"


class Unversioned:
    """A torch tensor behind the protocol of before DLPack 1.0: no ``max_version``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, stream: Any = None) -> Any:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()


class NoKeywords(Unversioned):
    """The oldest form: ``__dlpack__`` without any keyword."""

    def __dlpack__(self) -> Any:
        return self._tensor.__dlpack__()


class Versioned(Unversioned):
    """A torch tensor behind the protocol of today."""

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._tensor.__dlpack__(**keywords)


class Failing(Unversioned):
    """Raises its own error on export."""

    def __dlpack__(self, **keywords: Any) -> Any:
        raise ZeroDivisionError("export failed")
