import math
import struct
import subprocess
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq.errors import FormatError
from kvq.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    FP8_E4M3,
    INT8,
    INT8_CODE,
    MXFP4,
    NVFP4,
    NVFP4_KV,
    get_format,
)

ML_DTYPES = [
    pytest.param(E4M3, ml_dtypes.float8_e4m3fn, id="e4m3"),
    pytest.param(E5M2, ml_dtypes.float8_e5m2, id="e5m2"),
    pytest.param(E2M1, ml_dtypes.float4_e2m1fn, id="e2m1"),
    pytest.param(E2M3, ml_dtypes.float6_e2m3fn, id="e2m3"),
    pytest.param(E3M2, ml_dtypes.float6_e3m2fn, id="e3m2"),
    pytest.param(E8M0, ml_dtypes.float8_e8m0fnu, id="e8m0"),
]
MINIFLOATS = ML_DTYPES[:-1]
SCALED = [fmt for fmt in FORMATS.values() if fmt.scale_divisor is not None]


def as_bytes(value):
    return struct.pack("<d", value)


@pytest.mark.parametrize(("element", "dtype"), ML_DTYPES)
def test_every_code_decodes_as_in_ml_dtypes(element, dtype):
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    for code, expected in zip(codes, codes.view(dtype).astype(np.float64), strict=True):
        value = element.decode(int(code))
        assert as_bytes(value) == as_bytes(expected) or (math.isnan(value) and np.isnan(expected))


@pytest.mark.parametrize(("element", "dtype"), MINIFLOATS)
def test_encode_is_the_ml_dtypes_cast_on_codes_midpoints_and_their_neighbours(element, dtype):
    codes = np.array(element.magnitudes)
    middles = (codes[:-1] + codes[1:]) / 2
    points = np.concatenate([codes, middles]).astype(np.float32)
    below, above = np.nextafter(points, np.float32(-9e9)), np.nextafter(points, np.float32(9e9))
    values = np.concatenate([points, below, above])
    values = np.concatenate([values, -values])
    expected = values.clip(-element.max, element.max).astype(dtype).view(np.uint8)
    assert [element.encode(float(value)) for value in values] == expected.tolist()


@pytest.mark.parametrize(("element", "dtype"), MINIFLOATS)
def test_encode_inverts_decode_on_every_finite_code(element, dtype):
    for code in range(1 << element.bits):
        if math.isfinite(element.decode(code)):
            assert element.encode(element.decode(code)) == code


@pytest.mark.parametrize(
    ("element", "code", "value"),
    [
        (E4M3, 0x7E, 448.0),
        (E4M3, 0x08, 2.0**-6),
        (E4M3, 0x07, 0.875 * 2.0**-6),
        (E4M3, 0x01, 2.0**-9),
        (E4M3, 0x80, -0.0),
        (E4M3, 0xFE, -448.0),
        (E5M2, 0x7B, 57344.0),
        (E5M2, 0x04, 2.0**-14),
        (E5M2, 0x03, 0.75 * 2.0**-14),
        (E5M2, 0x01, 2.0**-16),
        (E5M2, 0x7C, math.inf),
        (E5M2, 0xFC, -math.inf),
        (E2M1, 0x7, 6.0),
        (E2M1, 0x1, 0.5),
        (E2M1, 0xA, -1.0),
        (E2M3, 0x1F, 7.5),
        (E2M3, 0x01, 0.125),
        (E2M3, 0x08, 1.0),
        (E3M2, 0x1F, 28.0),
        (E3M2, 0x01, 0.0625),
        (E3M2, 0x04, 0.25),
        (E8M0, 0, 2.0**-127),
        (E8M0, 127, 1.0),
        (E8M0, 254, 2.0**127),
        (INT8_CODE, -127, -127.0),
        (INT8_CODE, -128, -128.0),
    ],
)
def test_codes_decode_to_the_values_of_the_specifications(element, code, value):
    assert as_bytes(element.decode(code)) == as_bytes(value)


def test_e2m1_has_the_eight_magnitudes_of_the_specification():
    assert E2M1.magnitudes == (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.mark.parametrize(
    ("element", "codes"), [(E4M3, [0x7F, 0xFF]), (E5M2, [0x7D, 0x7E, 0x7F, 0xFD]), (E8M0, [255])]
)
def test_nan_codes_are_those_of_the_specifications(element, codes):
    assert all(math.isnan(element.decode(code)) for code in codes)
    assert element.nan_code in codes


@pytest.mark.parametrize(
    ("element", "largest_power", "smallest"),
    [(E4M3, 8, 2**-9), (E5M2, 15, 2**-16), (E2M1, 2, 0.5), (E2M3, 2, 0.125), (E3M2, 4, 0.0625)],
)
def test_extremes_are_those_of_the_specifications(element, largest_power, smallest):
    assert element.max_exponent == largest_power
    assert element.smallest_subnormal == smallest


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1, E2M3, E3M2])
def test_infinity_saturates_and_keeps_its_sign(element):
    assert element.decode(element.encode(math.inf)) == element.max
    assert element.decode(element.encode(-math.inf)) == -element.max


@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_nan_encodes_as_nan_where_there_is_one(element):
    assert math.isnan(element.decode(element.encode(math.nan)))


@pytest.mark.parametrize("element", [E2M1, E2M3, E3M2, INT8_CODE])
def test_nan_is_refused_where_there_is_none(element):
    with pytest.raises(FormatError) as error:
        element.encode(math.nan)
    assert error.value.code == "format.nan"


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.5, 0), (1.5, 2), (-2.5, -2), (126.5, 126), (127.5, 127), (-128.0, -127), (-math.inf, -127)],
)
def test_int8_rounds_half_to_even_and_never_writes_its_lowest_code(value, code):
    assert INT8_CODE.encode(value) == code


@pytest.mark.parametrize(
    ("name", "divisor", "bits_per_value", "num_bits", "block", "scale_bits"),
    [
        ("fp8_e4m3", 448, 8, (4, 3), None, None),
        ("fp8_e5m2", 57344, 8, (5, 2), None, None),
        ("int8", 127, 8, 8, None, None),
        ("nvfp4", 448, 4.5, (2, 1), 16, (4, 3)),
        ("nvfp4_weight", 2688, 4.5, (2, 1), 16, (4, 3)),
        ("mxfp8", None, 8.25, (4, 3), 32, (8, 0)),
        ("mxfp6_e2m3", None, 6.25, (2, 3), 32, (8, 0)),
        ("mxfp6_e3m2", None, 6.25, (3, 2), 32, (8, 0)),
        ("mxfp4", None, 4.25, (2, 1), 32, (8, 0)),
    ],
)
def test_formats_have_their_published_numbers(
    name, divisor, bits_per_value, num_bits, block, scale_bits
):
    fmt = get_format(name)
    assert fmt.name == name
    assert fmt.scale_divisor == divisor
    assert fmt.bits_per_value == bits_per_value
    assert fmt.num_bits == num_bits
    assert fmt.block_size == block
    assert fmt.scale_bits == scale_bits


def test_formats_lists_nine_formats():
    assert len(FORMATS) == 9


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fp8", "did you mean `fp8_e4m3`?"),
        ("NVFP4", "did you mean `nvfp4`?"),
        ("int_8", "did you mean `int8`?"),
        ("", None),
        ("bfloat16", None),
    ],
)
def test_an_unknown_format_lists_all_and_hints_at_a_near_one(name, hint):
    with pytest.raises(FormatError, match=r"known: fp8_e4m3, .*, mxfp4$") as error:
        get_format(name)
    assert error.value.code == "format.unknown"
    assert error.value.hint == hint


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.name)
@given(amax=st.floats(min_value=2.0**-100, max_value=2.0**120, width=32))
def test_a_scale_is_one_float32_division_and_doubles_with_amax(fmt, amax):
    scale = fmt.scale(amax)
    assert scale == np.float32(amax) / np.float32(fmt.scale_divisor)
    assert fmt.scale(2 * amax) == 2 * scale


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.name)
@given(amax=st.floats(min_value=2.0**-100, max_value=2.0**120, width=32))
def test_amax_inverts_scale_within_one_ulp(fmt, amax):
    assert abs(fmt.amax(fmt.scale(amax)) - amax) <= np.spacing(np.float32(amax))


def test_amax_of_a_scale_can_differ_from_the_amax_it_came_from():
    assert FP8_E4M3.amax(FP8_E4M3.scale(1.9921875)) != 1.9921875


@pytest.mark.parametrize(
    ("amax", "code"),
    [
        (math.nan, "format.amax_nonfinite"),
        (math.inf, "format.amax_nonfinite"),
        (-math.inf, "format.amax_nonfinite"),
        (1e39, "format.amax_nonfinite"),
        (0.0, "format.amax_nonpositive"),
        (-0.0, "format.amax_nonpositive"),
        (-1.0, "format.amax_nonpositive"),
        (1e-300, "format.amax_tiny"),
        (2.0**-149, "format.amax_tiny"),
        (2.0**-126, "format.amax_tiny"),
    ],
)
@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.name)
def test_an_amax_without_a_valid_scale_is_refused(fmt, amax, code):
    with pytest.raises(FormatError) as error:
        fmt.scale(amax)
    assert error.value.code == code


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.name)
def test_the_smallest_normal_scale_is_accepted_and_the_next_smaller_is_not(fmt):
    smallest = 2.0**-126
    amax = np.float32(smallest * fmt.scale_divisor)
    assert fmt.scale(float(amax)) == smallest
    with pytest.raises(FormatError):
        fmt.scale(float(amax * np.float32(0.999)))


def test_an_mx_format_has_no_tensor_scale():
    for call in (MXFP4.scale, MXFP4.amax):
        with pytest.raises(FormatError) as error:
            call(1.0)
        assert error.value.code == "format.no_tensor_scale"


def test_power_of_two_rounding_belongs_to_formats_with_such_a_scale():
    assert replace(MXFP4, scale_rounding="ceil") != MXFP4
    for fmt, rounding in ((INT8, "floor"), (NVFP4, "ceil"), (MXFP4, None)):
        with pytest.raises(AssertionError):
            replace(fmt, scale_rounding=rounding)


def test_nvfp4_kv_block_scales_stay_below_saturation():
    largest_block = 1.0 / E2M1.max / NVFP4_KV.scale(1.0)
    assert largest_block < E4M3.max / (E2M1.max - 0.5)


def test_formats_do_not_import_torch():
    code = "import kvq.formats, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
