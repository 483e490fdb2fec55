"""Objects that say they are arrays and are not, or not twice: refused by name, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn

F4 = np.float32
# NumPy before 2.2.4 writes the sizes of any __array_interface__ into room for the ranks it has, and
# dies of 100 (numpy/numpy#27949): there, one that has its largest rank.
RANK = 100 if np.lib.NumpyVersion(np.__version__) >= "2.2.4" else 32
Q = np.ones((2, 5, 4), F4)
INTERFACE = {"version": 3, "shape": (2, 5, 4), "typestr": "<f4", "data": (Q.ctypes.data, False)}


def with_interface(**change):
    class Liar:
        def __init__(self):
            self.__array_interface__ = {**INTERFACE, **change}

    return Liar()


def with_array(function):
    class Liar:
        def __array__(self, dtype=None, copy=None):
            return function()

    return Liar()


def with_dlpack(capsule, device=(1, 0)):
    class Liar:
        def __dlpack__(self, **ignored):
            return capsule() if callable(capsule) else capsule

        def __dlpack_device__(self):
            return device

    return Liar()


class Changing:
    """Another shape each time that it is asked."""

    def __init__(self):
        self.length = 5

    def __array__(self, dtype=None, copy=None):
        self.length += 1
        return np.ones((2, self.length, 4), F4)


def fail():
    raise RuntimeError("no memory behind this")


LIARS = {
    "negative shape": lambda: with_interface(shape=(2, -5, 4)),
    "shape of floats": lambda: with_interface(shape=(2.0, 5.0, 4.0)),
    "shape too large": lambda: with_interface(shape=(1 << 62, 1 << 62, 4)),
    "rank too high": lambda: with_interface(shape=(1,) * RANK),
    "no type": lambda: with_interface(typestr="nonsense"),
    "strides of another rank": lambda: with_interface(strides=(4,)),
    "strides that overflow": lambda: with_interface(strides=(1 << 70, 4, 4)),
    "data that is no address": lambda: with_interface(data=("here", False)),
    "not a mapping": lambda: type("Liar", (), {"__array_interface__": 7})(),
    "array is a list": lambda: with_array(lambda: [1.0, 2.0]),
    "array fails": lambda: with_array(fail),
    "capsule is None": lambda: with_dlpack(None),
    "capsule is an int": lambda: with_dlpack(12345),
    "capsule fails": lambda: with_dlpack(fail),
    "capsule of an unknown device": lambda: with_dlpack(None, (77, 0)),
    "object": lambda: np.array([[[object()] * 4] * 5] * 2),
    "structured": lambda: np.zeros((2, 5), "f4,f4"),
    "text": lambda: np.full((2, 5, 4), "1.0"),
    "dates": lambda: np.zeros((2, 5, 4), "M8[s]"),
    "0-d": lambda: np.array(1.0, F4),
}


@pytest.mark.parametrize("who", LIARS)
@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias", "out"])
def test_liars_are_refused_by_name(who, name):
    arguments = {"q": Q, "k": Q, "v": Q, name: LIARS[who]()}
    if name == "bias" and who == "0-d":
        return  # a bias may be one number
    with pytest.raises((TypeError, ValueError), match=name):
        fastattn.attention(**arguments, backend="numpy")


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_what_changes_is_asked_once_or_refused(name):
    arguments = {"q": Q, "k": Q, "v": Q, name: Changing()}
    try:
        out = fastattn.attention(**arguments, backend="numpy")
    except ValueError:
        return
    assert np.isfinite(out).all()


class Subclass(np.ndarray):
    """One whose operators and functions do harm."""

    def __array_function__(self, *args, **keywords):
        raise AssertionError("a function of NumPy was called with it")

    def __array_ufunc__(self, *args, **keywords):
        raise AssertionError("a ufunc was called with it")

    def __getitem__(self, key):
        raise AssertionError("indexed")


def test_methods_of_subclasses_are_not_called(backend):
    given = [Q.view(Subclass) for _ in range(3)]
    mask = np.ones((5, 5), bool).view(Subclass)
    bias = np.zeros((5, 5), F4).view(Subclass)
    alibi = np.ones(2, F4).view(Subclass)
    out = fastattn.attention(*given, mask=mask, bias=bias, alibi=alibi, backend=backend)
    assert type(out) is np.ndarray
    np.testing.assert_allclose(out, 1, rtol=1e-6)
