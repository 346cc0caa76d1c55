"""The table of safetensors dtypes agrees with the one of the safetensors package."""

import safetensors.torch

from composer3d.convert.formats import DTYPES, SAFETENSORS_DTYPES, dtype_name


def test_codes_of_dtypes_are_those_of_safetensors() -> None:
    # An entry may be None, for a dtype that this torch does not have.
    theirs = {code: dtype for code, dtype in safetensors.torch._TYPES.items() if dtype is not None}
    assert {code: SAFETENSORS_DTYPES.get(code) for code in theirs} == theirs


def test_every_dtype_has_one_code() -> None:
    names = [dtype_name(dtype) for dtype in SAFETENSORS_DTYPES.values()]
    assert len(set(names)) == len(names)
    assert set(DTYPES) <= set(names)
