"""Checkpoint reader and writer: the released tensors, goldens bit for bit, round trips, damaged folders."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from deepinfer.errors import CheckpointError
from deepinfer.model import checkpoint
from deepinfer.model.checkpoint import (
    INDEX,
    TensorSpec,
    allocate,
    file_form,
    fill,
    load_checkpoint,
    tensor_table,
    write_checkpoint,
)
from deepinfer.model.config import ModelConfig
from deepinfer.model.synthetic import TINY_TOKENIZER, full, synthetic_weights, tiny

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = Path(os.environ.get("DEEPINFER_GOLDENS") or ROOT.parent / "shared" / "goldens")
needs_goldens = pytest.mark.skipif(not GOLDENS.is_dir(), reason="the goldens are not there (DEEPINFER_GOLDENS)")
SHARD = 3_000_000  # tiny is 6.8 MB: three shards


@pytest.fixture(scope="module")
def config():
    return tiny()


@pytest.fixture(scope="module")
def written(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("written")
    write_checkpoint(path, config, synthetic_weights(config), shard_bytes=SHARD, tokenizer=TINY_TOKENIZER)
    return path


@pytest.fixture
def folder(written, tmp_path):
    """A private copy to damage."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


# ---- what there is ----


def test_release_counts():
    table = tensor_table(full())
    assert len(table) == 96_085
    assert sum(s.parameters for s in table.values()) == 763_205_315_794
    assert sum(s.nbytes for s in table.values()) == 510_286_023_000
    elements = Counter()
    for s in table.values():
        elements[s.dtype] += s.numel
    assert elements == {
        "I8": 278_585_671_680,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "BF16": 1_976_441_856,
        "F32": 42_307_282,
    }


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.39.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.20.attn.compressor.wkv.weight", "BF16", (512, 5120)),
        ("layers.24.attn.indexer.wq_b.weight", "F8_E4M3", (4096, 1280)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.1.engram.wkv.scale", "F8_E8M0", (800, 192)),
        ("layers.7.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.7.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("mtp.1.ffn.gate.bias_vl", "F32", (128,)),
        ("mtp.0.main_proj.weight", "F8_E4M3", (5120, 15360)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("vision.blocks.31.mlp.w1.weight", "BF16", (5632, 1024)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
        ("layers.3.hc_ffn_fn", "F32", (24, 20480)),
    ],
)
def test_release_shapes(name, dtype, shape):
    assert tensor_table(full())[name] == TensorSpec(dtype, shape)


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",  # ratio 1 pools nothing
        "layers.24.attn.indexer.wk.weight",  # reads the keys of layer 20
        "layers.3.attn.indexer.wq_b.weight",
        "mtp.0.engram.wkv.weight",
        "mtp.1.norm.weight",
        "layers.2.ffn.experts.384.w1.weight",
    ],
)
def test_release_lacks(name):
    assert name not in tensor_table(full())


def test_release_builds_on_meta():
    weights = allocate(full(), device="meta")
    assert all(t.is_meta for t in weights.values())
    assert sum(t.nbytes for t in weights.values()) == 510_286_023_000
    assert weights["layers.5.ffn.experts.w13.weight"].shape == (384, 4608, 2560)
    assert weights["layers.5.attn.wqkv_a.scale"].shape == (56, 160)
    assert weights["mtp.2.ffn.experts.w2.scale"].shape == (128, 5120, 72)


@needs_goldens
@pytest.mark.parametrize("name", ["tiny", "lite"])
def test_table_is_the_goldens(name):
    path = GOLDENS / name
    headers = {}
    for shard in sorted(path.glob("model-*.safetensors")):
        headers |= checkpoint._read_header(shard)
    assert tensor_table(ModelConfig.from_dir(path)) == headers


# ---- reading ----


@needs_goldens
@pytest.mark.parametrize("name", ["tiny", "lite"])
def test_goldens_load_bit_for_bit(name):
    path = GOLDENS / name
    config = ModelConfig.from_dir(path)
    weights = load_checkpoint(path, config)
    assert {t.dtype for n, t in weights.items() if n.endswith(".scale")} == {torch.uint8}
    loaded = dict(file_form(weights, config))
    for shard in path.glob("model-*.safetensors"):
        with safe_open(shard, framework="pt") as f:
            for key in f.keys():  # noqa: SIM118 (not a dict)
                assert torch.equal(bits(loaded.pop(key)), bits(f.get_tensor(key))), key
    assert not loaded


def test_fused_rows_and_stacked_experts(config, written):
    weights = load_checkpoint(written, config)
    raw = {}
    for shard in written.glob("*.safetensors"):
        raw |= load_file(shard)
    q, h, inter = config.q_lora_rank, config.hidden_size, config.moe_intermediate_size

    wqkv = weights["layers.3.attn.wqkv_a.weight"]
    assert wqkv.dtype == torch.float8_e4m3fn and wqkv.shape == (q + config.head_dim, h)
    assert torch.equal(bits(wqkv[:q]), bits(raw["layers.3.attn.wq_a.weight"]))
    assert torch.equal(bits(wqkv[q:]), bits(raw["layers.3.attn.wkv.weight"]))
    scale = weights["layers.3.attn.wqkv_a.scale"]
    assert torch.equal(scale[q // 32 :], raw["layers.3.attn.wkv.scale"].view(torch.uint8))

    w13 = weights["mtp.1.ffn.experts.w13.weight"]
    assert w13.dtype == torch.uint8 and w13.shape == (4, 2 * inter, h // 2)
    assert torch.equal(w13[3, :inter], raw["mtp.1.ffn.experts.3.w1.weight"].view(torch.uint8))
    assert torch.equal(w13[3, inter:], raw["mtp.1.ffn.experts.3.w3.weight"].view(torch.uint8))
    w2 = weights["mtp.1.ffn.experts.w2.scale"]
    assert w2.shape == (4, h, inter // 32)
    assert torch.equal(w2[2], raw["mtp.1.ffn.experts.2.w2.scale"].view(torch.uint8))

    shared = weights["layers.0.ffn.shared_experts.w13.weight"]
    assert torch.equal(bits(shared[inter:]), bits(raw["layers.0.ffn.shared_experts.w3.weight"]))
    pair = weights["layers.2.attn.compressor.wkv_gate.weight"]
    assert torch.equal(pair[config.head_dim :], raw["layers.2.attn.compressor.wgate.weight"])
    single = weights["layers.5.attn.compressor.wkv_gate.weight"]
    assert torch.equal(single, raw["layers.5.attn.compressor.wkv.weight"])
    assert torch.equal(weights["image_start"], raw["image_start"])
    assert not any(".wq_a." in n or ".experts.0." in n for n in weights)


def test_every_e8m0_code_survives(config, tmp_path):
    name = "layers.1.engram.embed.scale"
    codes = torch.arange(tensor_table(config)[name].numel).to(torch.uint8).view(tensor_table(config)[name].shape)
    tensors = ((n, codes if n == name else t) for n, t in synthetic_weights(config))
    write_checkpoint(tmp_path, config, tensors)
    assert torch.equal(load_checkpoint(tmp_path, config)[name], codes)


def test_load_gives_private_memory(config, folder):
    weights = load_checkpoint(folder, config)
    before = weights["embed.weight"].clone()
    for shard in folder.glob("*.safetensors"):
        shard.write_bytes(b"")
    assert torch.equal(weights["embed.weight"], before)


def test_fill_is_what_loading_does(config, written):
    weights = allocate(config)
    fill(weights, config, synthetic_weights(config))
    loaded = load_checkpoint(written, config)
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(bits(weights[n]), bits(loaded[n])) for n in weights)


# ---- writing ----


def test_write_load_write_is_byte_exact(config, written, tmp_path):
    weights = load_checkpoint(written, config)
    write_checkpoint(tmp_path, config, file_form(weights, config), shard_bytes=SHARD, tokenizer=TINY_TOKENIZER)
    files = sorted(p.name for p in written.iterdir())
    assert files == sorted(p.name for p in tmp_path.iterdir())
    for file in files:
        assert (written / file).read_bytes() == (tmp_path / file).read_bytes(), file


def test_written_folder(config, written):
    assert ModelConfig.from_dir(written) == config
    assert json.loads((written / "generation_config.json").read_text())["eos_token_id"] == 1
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (written / file).read_bytes() == (TINY_TOKENIZER / file).read_bytes()
    index = json.loads((written / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(s.nbytes for s in tensor_table(config).values())
    assert set(index["weight_map"]) == set(tensor_table(config))
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert sorted(p.name for p in written.glob("*.safetensors*")) == [*shards, INDEX]
    assert len(shards) == 3
    for shard in shards:
        assert (written / shard).stat().st_size < SHARD + 100_000
        assert (written / shard).stat().st_mode == (written / INDEX).stat().st_mode


def test_order_of_tensors_does_not_matter(config, written, tmp_path):
    names = list(tensor_table(config))[::-1]
    write_checkpoint(tmp_path, config, synthetic_weights(config, names=names), shard_bytes=SHARD)
    one, other = load_checkpoint(written, config), load_checkpoint(tmp_path, config)
    assert all(torch.equal(bits(one[n]), bits(other[n])) for n in one)


def test_writer_holds_one_shard_at_most(config, tmp_path):
    alive: dict[str, int] = {}
    peak = 0

    def watched():
        nonlocal peak
        for name, tensor in synthetic_weights(config):
            alive[name] = tensor.nbytes
            weakref.finalize(tensor.untyped_storage(), alive.pop, name)
            peak = max(peak, sum(alive.values()))
            yield name, tensor
            del tensor

    write_checkpoint(tmp_path, config, watched(), shard_bytes=1_000_000)
    largest = max(s.nbytes for s in tensor_table(config).values())
    assert peak <= 1_000_000 + 2 * largest  # the shard, the tensor that closed it, the one being drawn


def test_writer_refuses_wrong_tensors(config, tmp_path):
    good = dict(synthetic_weights(config))

    def write(**changes):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        tensors = {**good, **changes}
        write_checkpoint(tmp_path / "out", config, ((n, t) for n, t in tensors.items() if t is not None))

    with pytest.raises(CheckpointError, match=r"missing tensor embed\.weight"):
        write(**{"embed.weight": None})
    with pytest.raises(CheckpointError, match="extra was given twice or is no tensor of this config"):
        write(extra=torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"norm.weight: expected BF16 \[192\], given .*bfloat16 \[191\]"):
        write(**{"norm.weight": good["norm.weight"][:191]})
    with pytest.raises(CheckpointError, match=r"norm.weight: expected BF16 \[192\], given torch.float32"):
        write(**{"norm.weight": good["norm.weight"].float()})
    with pytest.raises(CheckpointError, match="expected F8_E8M0"):  # a numeric copy of a scale
        write(**{"layers.0.attn.wkv.scale": good["layers.0.attn.wkv.scale"].float()})
    with pytest.raises(CheckpointError, match=r"embed\.weight was given twice"):
        write_checkpoint(tmp_path / "twice", config, [*good.items(), ("embed.weight", good["embed.weight"])])
    with pytest.raises(CheckpointError, match="does not exist"):  # and none of these looks like a checkpoint
        load_checkpoint(tmp_path / "out", config)


def test_writer_refuses_a_used_folder(config, written):
    with pytest.raises(CheckpointError, match="already holds a checkpoint: remove it or choose another"):
        write_checkpoint(written, config, synthetic_weights(config))


def test_writer_refuses_a_full_disk(config, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5_000_000))
    with pytest.raises(CheckpointError, match="needs 6,829,886 bytes and its disk has 5,000,000 free"):
        write_checkpoint(tmp_path, config, synthetic_weights(config))
    assert not list(tmp_path.iterdir())


def test_disk_fills_while_writing(config, tmp_path, monkeypatch):
    def save_one(*args, **kwargs):
        if list(tmp_path.glob("*.partial")):
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save_file", save_one)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left on device"):
        write_checkpoint(tmp_path, config, synthetic_weights(config), shard_bytes=SHARD)
    assert not list(tmp_path.iterdir())  # what was written gives its space back


def test_folder_cannot_be_made(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written: .*(Not a directory|File exists)"):
        write_checkpoint(tmp_path / "file", config, synthetic_weights(config))


# ---- damaged folders ----


def edit_shard(folder, change, number=1):
    """Rewrite one shard after `change(tensors)`; the index stays as it is."""
    file = sorted(folder.glob("model-*.safetensors"))[number - 1]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file.name


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def failure(folder, config):
    with pytest.raises(CheckpointError) as e:
        load_checkpoint(folder, config)
    return str(e.value)


def test_missing_shard(config, folder):
    gone = sorted(folder.glob("model-*"))[1]
    lost = sum(v == gone.name for v in json.loads((folder / INDEX).read_text())["weight_map"].values())
    gone.unlink()
    message = failure(folder, config)
    assert f"missing shard {gone.name}: No such file or directory (tensors in it: {lost})" in message
    assert "missing tensor" not in message  # said once, not once a tensor


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_shard(config, folder, keep):
    shard = sorted(folder.glob("model-*.safetensors"))[2]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:keep])
    message = failure(folder, config)
    assert f"truncated shard {shard.name}: {len(whole[:keep])} bytes" in message and "copy it again" in message


@pytest.mark.parametrize("header", [b"not json", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b"\xff\xfe\xfd\xfc"])
def test_damaged_header(config, folder, header):
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.write_bytes(struct.pack("<Q", len(header)) + header)
    assert f"damaged shard {shard.name}: unreadable header" in failure(folder, config)


def test_everything_wrong_in_one_error(config, folder):
    def first(t):
        t["embed.weight"] = t["embed.weight"].float()  # wrong dtype
        t["layers.0.attn.wkv.scale"] = t["layers.0.attn.wkv.scale"][:1].contiguous()  # misshapen
        t["layers.0.attn.wo_a.scale"] = t["layers.0.attn.wo_a.scale"].view(torch.uint8)
        del t["layers.0.attn.q_norm.weight"]  # the index still names it
        t["layers.0.attn.rotary.inv_freq"] = torch.zeros(4)  # nobody's

    name = edit_shard(folder, first)
    edit_index(
        folder,
        lambda m: (m.pop("norm.weight"), m.update({"head.bias": name})),
    )
    shards = sorted(folder.glob("model-*.safetensors"))
    shards[1].write_bytes(shards[1].read_bytes()[:-10])
    message = failure(folder, config)
    for part in (
        "wrong dtype embed.weight: F32, expected BF16",
        "wrong shape layers.0.attn.wkv.scale: [1, 6], expected [2, 6]",
        "wrong dtype layers.0.attn.wo_a.scale: U8, expected F8_E8M0",
        f"missing tensor layers.0.attn.q_norm.weight: {INDEX} places it in {name}, which lacks it",
        "unused tensor layers.0.attn.rotary.inv_freq",
        "missing tensor norm.weight",
        "unused tensor head.bias",
        f"truncated shard {shards[1].name}",
    ):
        assert part in message, part


def test_tensor_the_index_forgot_is_not_loaded_by_luck(config, folder):
    edit_index(folder, lambda m: m.pop("layers.0.attn_norm.weight"))
    message = failure(folder, config)
    assert "missing tensor layers.0.attn_norm.weight" in message
    assert "unused tensor layers.0.attn_norm.weight" in message


def test_config_and_weights_of_different_models(config, folder):
    message = failure(folder, replace(config, vision=None, n_routed_experts=9))
    assert "unused tensor vision.norm.weight" in message
    assert "missing tensor layers.8.ffn.experts.8.w2.scale" in message
    assert "wrong shape layers.0.ffn.gate.bias: [8], expected [9]" in message


def test_long_lists_are_cut(config, folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAX_LISTED", 3)
    edit_index(folder, lambda m: [m.pop(f"layers.{i}.attn.attn_sink") for i in range(9)])
    message = failure(folder, config)
    assert message.count("missing tensor layers") == 3 and "missing tensor: and 6 more" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "is no checkpoint folder, or was not written to its end"),
        ("{", "is not an index with a weight_map"),
        ('{"metadata": {}}', "is not an index with a weight_map"),
        ('{"weight_map": [1]}', "must map tensor names to shard names"),
        ('{"weight_map": {"embed.weight": 3}}', "must map tensor names to shard names"),
    ],
)
def test_bad_index(config, folder, text, expected):
    if text is None:
        (folder / INDEX).unlink()
    else:
        (folder / INDEX).write_text(text)
    assert expected in failure(folder, config)
