"""Image preprocessing: goldens bit for bit, grids of the spec, deepseek-recipe's token counts, bad images."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseek_recipe
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from deepinfer.errors import RequestError
from deepinfer.model.config import VisionConfig
from deepinfer.text.images import MAX_PIXELS, ImagePatches, fit, place_spans, preprocess

RELEASED = VisionConfig(
    num_hidden_layers=32,
    hidden_size=1024,
    num_attention_heads=16,
    intermediate_size=2816,
    patch_size=14,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_image_tokens=1024,
    min_pixels=295_936,
)
TINY = VisionConfig(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    intermediate_size=128,
    patch_size=14,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_image_tokens=64,
    min_pixels=7056,
)
# width, height -> patch grid, LLM grid, tokens (spec section 10)
GRIDS = [
    ((640, 480), (35, 46), (12, 16), 206),
    ((3000, 2000), (75, 112), (25, 38), 977),
    ((1344, 1344), (93, 93), (31, 31), 994),
    ((100, 2500), (195, 8), (65, 3), 262),
    ((50, 50), (39, 39), (13, 13), 184),
    ((4000, 60), (5, 318), (2, 106), 216),
]


def encoded(picture: Image.Image, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, form)
    return buffer.getvalue()


def noise(height: int, width: int, channels: int = 3) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_golden_patches(golden_array: Callable[[str, str], Any]) -> None:
    picture = Image.fromarray(golden_array("tiny", "p3.rgb").numpy())
    result = preprocess(picture, TINY)
    assert result.patches.dtype == torch.bfloat16
    assert torch.equal(result.patches, golden_array("tiny", "p3.patches"))
    n_h, n_w, llm_h, llm_w, _, length = golden_array("tiny", "p3.grid").tolist()
    found = (result.n_h, result.n_w, result.llm_h, result.llm_w, result.num_tokens)
    assert found == (n_h, n_w, llm_h, llm_w, length)


def test_golden_spans(golden_array: Callable[[str, str], Any]) -> None:
    ids = golden_array("tiny", "p3.ids").tolist()
    start, length = golden_array("tiny", "p3.grid").tolist()[4:]
    patches = preprocess(Image.fromarray(golden_array("tiny", "p3.rgb").numpy()), TINY)
    placeholder = [*ids[:start], 510, *ids[start + length :]]
    assert place_spans(placeholder, 510, [patches]) == (ids, [(start, length)])
    assert place_spans(ids, 510, [patches]) == (ids, [(start, length)])  # spans complete already


@pytest.mark.parametrize("size, patches, grid, tokens", GRIDS)
def test_spec_grids(size: Any, patches: Any, grid: Any, tokens: int) -> None:
    result = preprocess(Image.new("RGB", size, (1, 2, 3)), RELEASED)
    assert ((result.n_h, result.n_w), (result.llm_h, result.llm_w), result.num_tokens) == (
        patches,
        grid,
        tokens,
    )
    assert result.patches.shape == (patches[0] * patches[1], 3, 14, 14)


SIDE = st.integers(1, 64) | st.integers(100, 5000) | st.integers(1, 100_000)


@settings(max_examples=500, deadline=None)
@given(width=SIDE, height=SIDE)
@example(width=1, height=1)
@example(width=100_000, height=1)
@example(width=1, height=100_000)
def test_token_counts_of_the_service(width: int, height: int) -> None:
    pad_height, pad_width = fit(width, height, RELEASED)
    assert pad_height > 0 and pad_width > 0 and pad_height % 14 == pad_width % 14 == 0
    tokens = -(-pad_height // 42) * (-(-pad_width // 42) + 1) + 2
    assert tokens <= RELEASED.max_image_tokens
    if max(width, height) <= 8 * min(width, height):  # its own count for thin strips goes other ways
        info = deepseek_recipe.ImageInfo(b"", width, height)
        assert tokens == deepseek_recipe.MultiModalData([info]).image_token_adjustment() + 1


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 3000), height=st.integers(1, 30), flip=st.booleans())
def test_any_shape_fits_or_is_refused(width: int, height: int, flip: bool) -> None:
    picture = Image.new("L", (height, width) if flip else (width, height), 7)
    try:
        result = preprocess(picture, TINY)
    except RequestError as error:
        assert "too thin" in str(error) and max(width, height) / min(width, height) > 100
    else:
        assert result.num_tokens <= 64 and result.patches.shape[0] == result.n_h * result.n_w


def test_width_clamp_stretches() -> None:
    clamped = VisionConfig(**{**TINY.__dict__, "max_wh_ratio": 2.0})
    picture = noise(130, 1000)
    result = preprocess(picture, clamped)
    assert (result.n_h, result.n_w) == (10, 19)  # as 260 x 130
    stretched = picture.resize((19 * 14, 10 * 14), Image.Resampling.BICUBIC)  # a size that needs no padding
    assert torch.equal(result.patches, preprocess(stretched, TINY).patches)
    narrow = picture.crop((0, 0, 260, 130))
    assert torch.equal(preprocess(narrow, clamped).patches, preprocess(narrow, TINY).patches)


def test_sources_agree(tmp_path: Path) -> None:
    picture = noise(90, 130)
    data = encoded(picture)
    file = tmp_path / "a picture.png"
    file.write_bytes(data)
    expected = preprocess(picture, TINY).patches
    text = base64.b64encode(data).decode()
    percent = "data:image/png," + "".join(f"%{byte:02x}" for byte in data)
    for source in (
        data, file, str(file), file.as_uri(), Image.open(file),
        f"data:image/png;base64,{text}", f"data:;base64,{text}", percent,
    ):  # fmt: skip
        assert torch.equal(preprocess(source, TINY).patches, expected)
    for form in ("BMP", "TIFF", "GIF", "WEBP", "JPEG"):
        flat = Image.new("RGB", (130, 90), (255, 255, 255))
        assert torch.allclose(preprocess(encoded(flat, form), TINY).patches[20].float(), torch.ones(1), atol=0.02)


def test_modes() -> None:
    def value(picture: Image.Image) -> list[float]:
        patches = preprocess(picture, TINY).patches.float()
        pixels = ((patches[len(patches) // 2, :, 7, 7] + 1) * 127.5).round()
        return pixels.tolist()

    size = (140, 140)
    assert value(Image.new("L", size, 40)) == [40, 40, 40]
    assert value(Image.new("RGBA", size, (200, 0, 0, 0))) == [255, 255, 255]  # over white, as the service
    red = value(Image.new("RGBA", size, (200, 0, 0, 128)))
    assert np.allclose(red, [227, 127, 127], atol=1)
    assert value(Image.new("LA", size, (40, 0))) == [255, 255, 255]
    palette = Image.new("RGB", size, (10, 200, 30)).quantize(4)
    assert np.allclose(value(palette), [10, 200, 30], atol=1)
    sixteen = Image.fromarray(np.full((140, 140), 30_000, np.uint16))
    assert value(sixteen) == value(Image.open(io.BytesIO(encoded(sixteen)))) == [117, 117, 117]
    assert value(Image.new("1", size, 1)) == [255, 255, 255]
    assert value(Image.new("CMYK", size, (0, 0, 0, 0))) == [255, 255, 255]


def bomb(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds almost nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    "source, message",
    [
        (b"", r"image \(0 bytes\) cannot be read"),
        (b"no image at all", r"image \(15 bytes\) cannot be read"),
        (encoded(noise(50, 50))[:2000], r"image \(2000 bytes\) cannot be read"),
        (encoded(noise(50, 50), "JPEG")[:700], r"image \(700 bytes\) cannot be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read"),
        (bomb(10_000, 9_000), f"90000000|10000 x 9000 pixels, limit {MAX_PIXELS}"),
        (bomb(60_000, 60_000), f"more pixels than the limit {MAX_PIXELS}"),
        (bomb(0, 10), "cannot be read|empty"),
        (Image.new("RGB", (0, 5)), r"image \(PIL, 0 x 5, mode RGB\) is empty"),
        (Image.new("F", (9, 9)), "floating-point pixels"),
        ("no/such/file.png", r"image 'no/such/file\.png' does not exist"),
        (Path("no/such/file.png"), r"image no/such/file\.png does not exist"),
        (".", r"image '\.' cannot be read"),
        ("", "image '' cannot be read"),
        ("nul\0byte", "cannot be read"),
        ("https://example.com/cat.png", r"'https://example\.com/cat\.png': https URLs are not fetched"),
        ("ftp://example.com/cat.png", "ftp URLs are not fetched"),
        ("file://elsewhere/cat.png", "file URLs are not fetched"),
        ("http://[bad/cat.png", "http URLs are not fetched"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,@@@@", "not valid base64"),
        ("data:text/plain,hello", r"data URL of 21 characters, 'data:text/plain,hello'\.\.\.\) cannot be"),
        (17, "an image must be a PIL image, a path, bytes or a data: URL, not int"),
        (None, "not NoneType"),
        (np.zeros((4, 4, 3)), "not ndarray"),
    ],
    ids=lambda value: repr(value)[:30] if isinstance(value, str | bytes) else type(value).__name__,
)  # fmt: skip
def test_bad_images(source: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        preprocess(source, TINY)


def span(num_tokens: int) -> ImagePatches:
    return ImagePatches(torch.empty(0), 0, 0, 0, 0, num_tokens)


def test_place_spans() -> None:
    images = [span(4), span(6)]
    ids, spans = place_spans([1, 9, 9, 2], 9, images)
    assert ids == [1, *[9] * 10, 2] and spans == [(1, 4), (5, 6)]
    assert place_spans(ids, 9, images) == (ids, spans)  # adjacent spans, complete already
    assert place_spans([1, 2], 9, []) == ([1, 2], [])
    for bad in ([1, 9], [9, 9, 9], [1, 2]):
        with pytest.raises(RequestError, match=r"for 2 images: .* the whole spans \(10 tokens\)"):
            place_spans(bad, 9, images)
    with pytest.raises(RequestError, match="3 image tokens"):
        place_spans([9, 9, 9], 9, [])
    with pytest.raises(RequestError, match="span of image 0 is cut"):
        place_spans([9, 9, 1, 9, 9, *[9] * 6], 9, images)
