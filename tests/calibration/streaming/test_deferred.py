"""Weights made layer by layer are those that transformers loads, and merged ones are held once."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from kvq.calibration.model import model_class
from kvq.calibration.streaming.deferred import Deferred, Making
from kvq.calibration.streaming.errors import NotStreamable
from kvq.calibration.streaming.files import PAGE, File
from kvq.calibration.streaming.hollow import load_hollow
from kvq.calibration.streaming.stored import Memory, Reader
from kvq.checkpoint import open_checkpoint
from kvq.errors import CheckpointError
from kvq.geometry import read_geometry
from tests import zoo

CPU = torch.device("cpu")


def hollow_model(folder, dtype="auto"):
    view = open_checkpoint(folder)
    layers = read_geometry(view.config, view.tensors).layers
    return load_hollow(
        view, device="cpu", dtype=dtype, attentions=[layer.attention for layer in layers],
        trust_remote_code=False,
    )  # fmt: skip


def assert_filled_as_loaded(folder, dtype="auto"):
    config = json.loads((folder / "config.json").read_text())
    whole = model_class(config, trust_remote_code=False).from_pretrained(folder, dtype=dtype)
    expected = whole.state_dict()
    hollow = hollow_model(folder, dtype)
    names = {id(module): name for name, module in hollow.model.named_modules()}
    for number, layer in enumerate(hollow.layers):
        hollow.fill(number)
        filled = layer.state_dict(prefix=f"{names[id(layer)]}.")
        assert filled
        for name, tensor in filled.items():
            assert tensor.dtype == expected[name].dtype, name
            assert tensor.stride() == expected[name].stride(), name
            assert torch.equal(tensor, expected[name]), name
        hollow.empty(number)
        assert all(tensor.device.type == "meta" for tensor in layer.parameters())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("causal", "llama"),
        ("causal", "mixtral"),  # stack, then concatenate
        ("causal", "deepseek_v3"),
        ("causal", "gpt_neox"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("causal", "qwen3_moe"), ("causal", "gpt_oss"), ("causal", "jamba"),
                ("causal", "phimoe"), ("causal", "granitemoe"), ("causal", "ernie4_5_moe"),
                ("causal", "zamba"), ("causal", "llama4_text"), ("image-text", "qwen3_vl_moe"),
            )
        ),
    ],
)  # fmt: skip
def test_weights_are_those_that_transformers_loads(tmp_path, kind, name):
    zoo.tiny_model(kind, name).save_pretrained(tmp_path / "model", **zoo.SAVE.get(name, {}))
    assert_filled_as_loaded(tmp_path / "model")
    if name == "mixtral":
        assert_filled_as_loaded(tmp_path / "model", "float32")


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3"])
def test_a_layer_takes_no_more_memory_than_its_weights(tmp_path, monkeypatch, name):
    zoo.tiny_model("causal", name).save_pretrained(tmp_path / "model")
    hollow = hollow_model(tmp_path / "model")
    taken = []
    take = Memory.take
    monkeypatch.setattr(Memory, "take", lambda self, n, *at: taken.append(n) or take(self, n, *at))
    for number in range(len(hollow.layers)):
        size = hollow.layer_bytes(number)
        hollow.fill(number)
        assert sum(taken) == size == hollow.layer_bytes(number)
        taken.clear()


def stored(tmp_path):
    """A reader, and by name what stands for the tensors of a file and what they are."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(4, 6).bfloat16() for name in "abc"}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    infos = open_checkpoint(tmp_path).tensors
    return Reader(CPU), {name: Deferred.of(infos[name]) for name in "abc"}, tensors


@pytest.mark.parametrize(
    "work",
    [
        lambda a, b, c: a[...].to(device="cuda", dtype=torch.float32),
        lambda a, b, c: torch.stack([a, b, c], dim=0),
        lambda a, b, c: torch.cat([torch.stack([a, b]), torch.stack([c, a])], dim=1),
        lambda a, b, c: torch.cat([torch.stack([a, b]), torch.stack([c, a])], dim=2),
        lambda a, b, c: torch.cat((a, b.to(torch.float32))),
        lambda a, b, c: torch.stack([a, b], 1).to(torch.float32),
        lambda a, b, c: torch.cat([a.transpose(0, 1).contiguous(), c.T]),
        lambda a, b, c: torch.chunk(torch.cat([a, b]), 2, dim=0)[1].contiguous(),
        lambda a, b, c: a.to(torch.float16).to(torch.float32),
        lambda a, b, c: torch.stack([a, b.to(torch.float16).to(torch.bfloat16)]),
        lambda a, b, c: a.to(b.float()),
        lambda a, b, c: torch.nn.Parameter(a.reshape(2, 2, 6).permute(1, 0, 2)) * 2,
    ],
)
def test_what_is_done_to_deferred_tensors_is_done_to_their_values(tmp_path, work):
    reader, deferred, tensors = stored(tmp_path)
    weight = work(*deferred.values())
    assert weight.device.type == "meta"
    (made,) = Making(reader).make([weight])
    plain = {name: tensors[name].clone() for name in "abc"}
    expected = work(*plain.values()) if torch.cuda.is_available() else _on_cpu(work, plain)
    assert made.dtype == weight.dtype == expected.dtype
    assert torch.equal(made, expected.cpu())


def _on_cpu(work, plain):
    class Here(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            kwargs = {k: v for k, v in (kwargs or {}).items() if k != "device"}
            return super().__torch_function__(func, types, args, kwargs)

    return work(*(one.as_subclass(Here) for one in plain.values())).as_subclass(torch.Tensor)


def test_a_tensor_that_is_split_is_read_once(tmp_path, monkeypatch):
    reader, deferred, tensors = stored(tmp_path)
    halves = torch.chunk(deferred["a"], 2, dim=0)
    read = []
    fill = Reader._fill
    monkeypatch.setattr(
        Reader, "_fill", lambda self, file, info, *rest: read.append(info.name) or fill(
            self, file, info, *rest)
    )  # fmt: skip
    made = Making(reader).make(halves)
    assert torch.equal(torch.cat(made), tensors["a"])
    assert read == ["a"]


@pytest.mark.parametrize(
    "write",
    [
        lambda a: a.mul_(2),
        lambda a: a.__setitem__(0, 1),
        lambda a: a[0].zero_(),
        lambda a: a.T.chunk(2)[1].zero_(),
        lambda a: a.data.mul_(2),
        lambda a: setattr(a, "data", a * 2),
        lambda a: torch.mul(a, 2, out=a),
        lambda a: torch.nn.functional.relu(a, True),
        lambda a: torch._foreach_mul_([a], 2),
    ],
)
def test_a_weight_that_was_written_to_is_never_made_without_that(tmp_path, write):
    reader, deferred, _ = stored(tmp_path)
    row = deferred["a"][1]
    write(deferred["a"])
    with pytest.raises(NotStreamable, match="writes into its weights"):
        Making(reader).make([row])
    with pytest.raises(NotStreamable, match="writes into its weights"):
        Making(reader).make([torch.stack([deferred["b"], deferred["a"]])])
    with pytest.raises(NotStreamable, match="writes into its weights"):
        Making(reader).make([deferred["a"].T])


def test_what_is_neither_a_view_nor_written_to_is_made(tmp_path):
    reader, deferred, tensors = stored(tmp_path)
    deferred["a"].requires_grad = False
    deferred["b"].copy_(deferred["a"])
    (deferred["c"] * 2).zero_()
    made = Making(reader).make([deferred["a"], deferred["c"]])
    assert torch.equal(made[0], tensors["a"])
    assert torch.equal(made[1], tensors["c"])


def test_a_weight_of_tensors_without_values_is_not_made(tmp_path):
    reader, deferred, _ = stored(tmp_path)
    place = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")
    with pytest.raises(NotStreamable, match="no values yet"):
        Making(reader).make([torch.zeros_like(place).where(deferred["a"][0, 0] > 0, place)])


@pytest.mark.parametrize("size", [16, 20, 48, 64])  # of the piece; a tensor has 48
def test_what_is_cast_goes_through_one_piece_of_memory(tmp_path, monkeypatch, size):
    monkeypatch.setattr("kvq.calibration.streaming.stored._PIECE", size)
    reader, deferred, tensors = stored(tmp_path)
    taken = []
    take = Memory.take
    monkeypatch.setattr(Memory, "take", lambda self, n, *at: taken.append(n) or take(self, n, *at))
    made = Making(reader).make([deferred[name].to(torch.float32) for name in "abc"])
    assert sorted(taken) == [96, 96, 96, size + PAGE]
    for name, tensor in zip("abc", made, strict=True):
        assert torch.equal(tensor, tensors[name].float())


def test_memory_is_used_again_only_once_nothing_refers_to_it():
    memory = Memory()
    first = memory.take(4096)
    first.fill_(1)
    view = first[10:20].view(torch.int16)
    place = first.data_ptr()
    del first
    second = memory.take(4096)
    assert second.data_ptr() != place
    second.zero_()
    assert (view == 257).all()
    del view
    third = memory.take(4096)
    assert third.data_ptr() == place
    del second, third
    assert sum(map(len, memory._free.values())) == 2
    assert memory.take(100, skew=24).data_ptr() % PAGE == 24
    assert sum(map(len, memory._free.values())) == 2
    memory.take(2 * PAGE)  # of another size: what is free is given up
    assert set(memory._free) == {2}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("skew", [0, 24, "as in the file"])
def test_any_part_of_a_file_is_read_to_any_place(tmp_path, monkeypatch, cached, direct, skew):
    monkeypatch.setattr("kvq.calibration.streaming.files._CHUNK", 8 * PAGE)
    monkeypatch.setattr("kvq.calibration.streaming.files._STAGE", 2 * PAGE)
    monkeypatch.setattr(File, "_is_cached", lambda *_: cached)
    if not direct:
        monkeypatch.setattr(File, "_opened_directly", lambda _: None)
    data = torch.randint(0, 256, (50 * PAGE + 77,), dtype=torch.uint8)
    (tmp_path / "data").write_bytes(data.numpy().tobytes())
    memory, size = Memory(), len(data)
    with File(tmp_path / "data") as file:
        for start, end in [(0, size), (24, size), (24, 30), (PAGE, 3 * PAGE), (PAGE - 1, PAGE + 1),
                           (5000, 47 * PAGE), (size - 1, size), (8, 8)]:  # fmt: skip
            place = memory.take(end - start, start % PAGE if isinstance(skew, str) else skew)
            place.zero_()
            file.read(start, place)
            assert torch.equal(place, data[start:end])
        with pytest.raises(CheckpointError, match="`data` ended early"):
            file.read(size - 10, torch.zeros(11, dtype=torch.uint8))


def test_bytes_in_the_page_cache_are_known(tmp_path):
    (tmp_path / "data").write_bytes(bytes(64 * PAGE))
    with File(tmp_path / "data") as file:
        if file._direct is None:
            pytest.skip("this file system has no direct reads")
        os.fsync(file._file)
        assert file._is_cached(10, 60 * PAGE)
        os.posix_fadvise(file._file, 0, 0, os.POSIX_FADV_DONTNEED)
        assert not file._is_cached(10, 60 * PAGE)
        read = torch.ones(60 * PAGE, dtype=torch.uint8)
        file.read(10, read)
        assert not read.any()
        assert not file._is_cached(10, 60 * PAGE)  # nor does reading put them there


def test_of_a_file_of_others_it_is_not_known_what_is_in_the_page_cache(tmp_path, monkeypatch):
    (tmp_path / "data").write_bytes(bytes(64 * PAGE))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with File(tmp_path / "data") as file:
        assert not file._is_cached(0, 60 * PAGE)
        read = torch.ones(60 * PAGE, dtype=torch.uint8)
        file.read(10, read)
        assert not read.any()


def test_a_shard_that_is_cut_while_it_is_read_is_an_error(tmp_path):
    zoo.tiny_model("causal", "llama").save_pretrained(tmp_path / "model")
    hollow = hollow_model(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    for size in (path.stat().st_size // 2, 1, 0):
        os.truncate(path, size)
        with pytest.raises(CheckpointError, match="ended early") as caught:
            hollow.fill(len(hollow.layers) - 1)
        assert caught.value.hint == "copy or download the file again"
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        hollow.fill(0)
