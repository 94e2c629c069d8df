"""Random paged caches and what attention over them should give."""

import warnings
from contextlib import contextmanager

import torch

from kvq.kernels import reference
from kvq.kernels.checks import new_cache
from kvq.kernels.pages import SIXTEEN_BITS, PageLayout

POISON = 0x7F  # NaN as an E4M3 code, as a block scale and, twice, as bfloat16 and float16
BOUNDS = {"fast": 4e-2, "default": 3e-3, "exact": 3e-3}  # relative L2 error on random data
SHORT = {"fast": 3.0, "default": 2.0, "exact": 2.0}  # times as much, where few errors average


def poisoned(layout, num_pages, device="cpu"):
    """Caches that hold NaN wherever nothing has been written."""
    caches = new_cache(layout, num_pages, device)
    for cache in caches:
        if cache is not None:
            cache.view(torch.uint8).fill_(POISON if layout.format not in SIXTEEN_BITS else 0xFF)
    return caches


class Case:
    """K and V of requests of these lengths, in pages in random order, and one query each."""

    def __init__(self, layout, seq_lens, group=4, *, seed=None, device="cpu", peak=1.0,
                 dtype=torch.bfloat16):  # fmt: skip
        generator = torch.Generator()
        generator.seed() if seed is None else generator.manual_seed(seed)
        self.seed = generator.initial_seed()
        self.layout = layout
        heads, size = layout.num_kv_heads, layout.page_size
        if layout.format in SIXTEEN_BITS:
            dtype = getattr(torch, layout.format)
        per_request = [-(-n // size) for n in seq_lens]
        columns = max([*per_request, 1]) + 1
        num_pages = sum(per_request) + 3
        order = torch.randperm(num_pages, generator=generator).tolist()
        table = torch.full((len(seq_lens), columns), 2**31 - 1, dtype=torch.int32)
        slots = []
        for request, count in enumerate(per_request):
            pages = [order.pop() for _ in range(count)]
            table[request, :count] = torch.tensor(pages, dtype=torch.int32)
            slots += [pages[i // size] * size + i % size for i in range(seq_lens[request])]
        total = sum(seq_lens)

        def random(*shape):
            return torch.randn(*shape, generator=generator)

        self.q = (random(len(seq_lens), heads * group, layout.head_dim) * peak).to(dtype)
        self.k = random(total, heads, layout.head_dim).to(dtype)
        self.v = None if layout.shared else random(total, heads, layout.value_dim).to(dtype)
        self.slots = torch.tensor(slots, dtype=torch.int64)
        self.table, self.seq_lens = table, torch.tensor(seq_lens, dtype=torch.int32)
        self.num_pages = num_pages
        self.scales = {}
        if layout.kv_format is not None:
            k_scale = (
                (torch.rand(heads, generator=generator) + 0.5) * 4.5 / layout.kv_format.amax(1)
            )
            self.scales = {"k_scale": k_scale.float(), "v_scale": k_scale.float() * 1.25}
        for name, value in list(vars(self).items()):
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device))
        self.scales = {name: scale.to(device) for name, scale in self.scales.items()}
        self.k_cache, self.v_cache = poisoned(layout, num_pages, device)
        self.append()

    def append(self):
        """Write k and v, which a test may have changed, into the caches."""
        new = self.k, self.v, self.k_cache, self.v_cache, self.slots
        reference.append_kv(*new, layout=self.layout, **self.scales)

    @property
    def arguments(self):
        return (self.q, self.k_cache, self.v_cache, self.table, self.seq_lens)

    def bound(self, variant):
        """Largest relative L2 error that a request may have; over few values it averages less."""
        variant = "exact" if self.layout.format == "nvfp4" else variant
        short = bool(((self.seq_lens > 0) & (self.seq_lens < 100)).any())
        return BOUNDS[variant] * (SHORT[variant] if short else 1.5)

    def rescale(self, power):
        """Make all scales 2**power, codes small and of one sign, and q as small as logits need."""
        self.k, self.v = (None if x is None else x.abs() / 256 for x in (self.k, self.v))
        self.append()
        self.q = self.q * 2.0**-power
        scale = torch.full_like(self.scales["k_scale"], 2.0**power)
        self.scales = dict.fromkeys(self.scales, scale)

    def expected(self, **options):
        return reference.decode_attention(
            *self.arguments, layout=self.layout, **self.scales, **options
        )


def relative_error(actual, expected):
    """Largest relative L2 error of a request; a request that should be zero must be."""
    difference = (actual.double() - expected.double()).flatten(1).norm(dim=1)
    norm = expected.double().flatten(1).norm(dim=1)
    assert bool(actual.isfinite().all())
    assert bool((difference[norm == 0] == 0).all())
    return float((difference / norm.clamp(min=1e-300)).max()) if len(norm) else 0.0


@contextmanager
def no_synchronisation():
    """Fail where the host waits for the device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


LAYOUTS = {
    "bfloat16": PageLayout("bfloat16", 16, 2, 64),
    "float16": PageLayout("float16", 32, 1, 128),
    "fp8": PageLayout("fp8_e4m3", 16, 2, 64),
    "fp8-odd": PageLayout("fp8_e4m3", 48, 1, 80),
    "fp8-value": PageLayout("fp8_e4m3", 32, 2, 96, 64),
    "fp8-page": PageLayout("fp8_e4m3", 256, 1, 64),
    "fp8-chunk": PageLayout("fp8_e4m3", 96, 1, 64, 192),
    "nvfp4": PageLayout("nvfp4", 16, 2, 128),
    "nvfp4-odd": PageLayout("nvfp4", 48, 1, 80),
    "nvfp4-chunk": PageLayout("nvfp4", 64, 1, 64, 192),
    "mla-bfloat16": PageLayout("bfloat16", 64, 1, 576, 512, shared=True),
    "mla-fp8": PageLayout("fp8_e4m3", 16, 1, 576, 512, shared=True),
    "mla-nvfp4": PageLayout("nvfp4", 16, 1, 576, 512, shared=True),
}
