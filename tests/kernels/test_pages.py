import pytest

from kvq.errors import InputError
from kvq.kernels.pages import PageLayout, blocks, half


@pytest.mark.parametrize(
    ("size", "bytes_", "scales"),
    [(64, 32, 4), (80, 48, 6), (96, 48, 6), (128, 64, 8), (192, 96, 12), (576, 288, 36)],
)
def test_half_a_row_is_whole_blocks(size, bytes_, scales):
    assert (half(size), blocks(size)) == (bytes_, scales)


@pytest.mark.parametrize(
    ("layout", "k", "v", "per_token"),
    [
        (PageLayout("bfloat16", 16, 8, 128), 16 * 128, 16 * 128, 2 * 2 * 8 * 128),
        (PageLayout("fp8_e4m3", 64, 8, 128), 64 * 128, 64 * 128, 2 * 8 * 128),
        (PageLayout("fp8_e4m3", 16, 4, 192, 128), 16 * 192, 16 * 128, 4 * (192 + 128)),
        (PageLayout("nvfp4", 128, 8, 128), 128 * 72, 128 * 72, 8 * 2 * 72),
        (PageLayout("nvfp4", 16, 1, 576, 512, shared=True), 16 * 324, 0, 324),
    ],
    ids=lambda x: f"{x.format}-{x.head_dim}" if isinstance(x, PageLayout) else None,
)
def test_a_page_holds_codes_and_scales_and_nothing_else(layout, k, v, per_token):
    assert (layout.k_elements, layout.v_elements) == (k, v)
    assert layout.bytes_per_token == per_token


@pytest.mark.parametrize(
    ("name", "page_size", "chunk"),
    [("nvfp4", 16, 16), ("nvfp4", 48, 16), ("nvfp4", 128, 16), ("fp8_e4m3", 16, 16),
     ("fp8_e4m3", 128, 128), ("fp8_e4m3", 256, 128), ("fp8_e4m3", 48, 16), ("fp8_e4m3", 80, 16),
     ("fp8_e4m3", 96, 32), ("fp8_e4m3", 192, 64)],
)  # fmt: skip
def test_v_lies_in_chunks_that_divide_the_page(name, page_size, chunk):
    assert PageLayout(name, page_size, 1, 64).chunk == chunk


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("int4", 16, 1, 64), "kernel.format"),
        (("nvfp4", 24, 1, 64), "kernel.page_size"),
        (("nvfp4", 0, 1, 64), "kernel.page_size"),
        (("fp8_e4m3", 16, 1, 72), "kernel.head_dim"),
        (("fp8_e4m3", 16, 1, 64, 40), "kernel.head_dim"),
        (("fp8_e4m3", 16, 1, 64, 80, True), "kernel.head_dim"),
        (("fp8_e4m3", 16, 0, 64), "kernel.heads"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(arguments, code):
    with pytest.raises(InputError) as error:
        PageLayout(*arguments)
    assert error.value.code == code
