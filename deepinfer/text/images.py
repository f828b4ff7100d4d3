"""One image to the patches that the vision tower reads (spec section 10).

Belongs here: decoding, the choice of the grid, padding, patches, the place of image spans in the prompt ids.
Does not belong here: the vision tower (model/vision.py). Nothing here opens a network connection. The
preprocessing of deepseek-recipe is for a client: it re-encodes pictures lossily and knows the released sizes
only. Followed here are its token counts and its treatment of transparency, 16-bit grey and EXIF rotation
(none).
"""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote, unquote_to_bytes

from PIL import Image, ImageOps

from deepinfer.errors import RequestError

if TYPE_CHECKING:
    import torch

    from deepinfer.model.config import VisionConfig

ImageInput: TypeAlias = "Image.Image | str | os.PathLike[str] | bytes"

MAX_PIXELS = 89_478_485  # decoded size limit, a quarter GiB of RGB: Pillow's own line for a suspected bomb
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # pure decoders; others, such as EPS, start programs
_GREY = (127, 127, 127)


@dataclass(frozen=True)
class ImagePatches:
    """patches: bfloat16 [n_h * n_w, 3, patch, patch], row-major, values in [-1, 1].

    n_h, n_w: patch grid. llm_h, llm_w: grid that the language model sees. num_tokens: length of the span in
    the prompt: START, for each grid row its columns and NEWLINE, END.
    """

    patches: torch.Tensor
    n_h: int
    n_w: int
    llm_h: int
    llm_w: int
    num_tokens: int


def preprocess(image: ImageInput, vision: VisionConfig) -> ImagePatches:
    """Patches of a PIL image, a file (path or file: URL), the bytes of a file, or a data: URL.

    Raises RequestError, which names the image, for one that cannot be read, is empty, has more than
    MAX_PIXELS or is too thin, for other types and for URLs that would need a network.
    """
    import numpy as np
    import torch

    name = describe(image)
    picture = _to_rgb(_open(image, name), name)
    width, height, stretch = *picture.size, False
    if vision.max_wh_ratio is not None and width > height * vision.max_wh_ratio:
        width, stretch = int(height * vision.max_wh_ratio), True
    height, width = fit(width, height, vision)
    try:
        if stretch:
            picture = picture.resize((width, height), Image.Resampling.BICUBIC)
        else:
            picture = ImageOps.pad(picture, (width, height), color=_GREY)
    except ValueError as exc:  # Pillow refuses a side that rounds to zero
        size = f"{picture.width} x {picture.height}"
        raise RequestError(f"{name} is too thin with {size} pixels for a grid of patches: crop it") from exc

    patch = vision.patch_size
    n_h, n_w = height // patch, width // patch
    pixels = torch.from_numpy(np.array(picture)).float()  # [H, W, 3]
    pixels = pixels.div_(255).sub_(0.5).div_(0.5).to(torch.bfloat16)
    patches = pixels.view(n_h, patch, n_w, patch, 3).permute(0, 2, 4, 1, 3).reshape(-1, 3, patch, patch)
    llm_h, llm_w = _llm_grid(height, width, vision)
    return ImagePatches(patches, n_h, n_w, llm_h, llm_w, _span(llm_h, llm_w))


def fit(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """(height, width) in pixels that an image is padded to: whole patches, within the token budget."""
    patch = vision.patch_size
    cell = patch * vision.downsample_ratio  # pixels along a side of one LLM position
    if width * height < vision.min_pixels:
        scale = math.sqrt(vision.min_pixels / (width * height))
        width, height = int(width * scale), int(height * scale)
    best = math.ceil(height / patch) * patch, math.ceil(width / patch) * patch
    if _span(*_llm_grid(*best, vision)) <= vision.max_image_tokens:
        return best
    budget = vision.max_image_tokens - 2  # rows * (columns + newline)
    aspect = height / width
    columns = math.sqrt(budget / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1:
        return budget // 2 * cell, cell
    if rows < 1:
        return cell, (budget - 1) * cell
    scale = min(int(columns) * cell / width, int(rows) * cell / height)
    return int(height * scale / patch) * patch, int(width * scale / patch) * patch


def place_spans(
    token_ids: Sequence[int], image_token: int, images: Sequence[ImagePatches]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Prompt ids in which every image has its whole span, and the (start, length) of each span.

    Each `image_token` is a placeholder for one image, in order; ids whose spans are complete already stay as
    they are. Raises RequestError when the numbers do not fit.
    """
    lengths = [image.num_tokens for image in images]
    found = sum(token == image_token for token in token_ids)
    whole = bool(lengths) and found == sum(lengths)
    if not whole and found != len(lengths):
        raise RequestError(
            f"the prompt has {found} image tokens (id {image_token}) for {len(lengths)} images: put one for "
            f"each, or the whole spans ({sum(lengths)} tokens)"
        )
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    rest = iter(token_ids)
    for token in rest:
        if token != image_token:
            ids.append(token)
            continue
        length = lengths[len(spans)]
        if whole and any(next(rest, None) != image_token for _ in range(length - 1)):
            raise RequestError(f"the span of image {len(spans)} is cut: its {length} tokens must be adjacent")
        spans.append((len(ids), length))
        ids.extend([image_token] * length)
    return ids, spans


def _llm_grid(height: int, width: int, vision: VisionConfig) -> tuple[int, int]:
    cell = vision.patch_size * vision.downsample_ratio
    return math.ceil(height / cell), math.ceil(width / cell)


def _span(llm_h: int, llm_w: int) -> int:
    return llm_h * (llm_w + 1) + 2


def describe(image: object) -> str:
    """How messages name an image: by its path, or by what kind of data it is and how much."""
    if isinstance(image, Image.Image):
        return f"image (PIL, {image.width} x {image.height}, mode {image.mode})"
    if isinstance(image, bytes):
        return f"image ({len(image)} bytes)"
    if isinstance(image, str) and image.startswith("data:"):
        return f"image (data URL of {len(image)} characters, {image[:40]!r}...)"
    return f"image {image!r}" if isinstance(image, str) else f"image {image}"


def _open(image: object, name: str) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    source: Path | io.BytesIO
    if isinstance(image, bytes):
        source = io.BytesIO(image)
    elif isinstance(image, str) and image.startswith("data:"):
        source = io.BytesIO(_data_url(image, name))
    elif isinstance(image, str | os.PathLike):
        source = _local_path(os.fsdecode(image), name)
    else:
        kind = type(image).__name__
        raise RequestError(f"an image must be a PIL image, a path, bytes or a data: URL, not {kind}")
    try:
        return Image.open(source, formats=FORMATS)
    except FileNotFoundError as exc:
        raise RequestError(f"{name} does not exist: check the path") from exc
    except Image.DecompressionBombError as exc:
        raise RequestError(f"{name} has more pixels than the limit {MAX_PIXELS}: scale it down") from exc
    except Exception as exc:
        raise _unreadable(name, exc) from exc


def _to_rgb(picture: Image.Image, name: str) -> Image.Image:
    """8-bit RGB: transparency over white, 16-bit grey by its high byte."""
    width, height = picture.size
    if width == 0 or height == 0:
        raise RequestError(f"{name} is empty: {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise RequestError(f"{name} has {width} x {height} pixels, limit {MAX_PIXELS}: scale it down")
    if picture.mode == "F":
        raise RequestError(f"{name} has floating-point pixels without a known range: convert it to 8-bit RGB")
    try:
        picture.load()
        if picture.mode.startswith("I"):
            picture = picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        if picture.has_transparency_data:
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        return picture.convert("RGB")
    except Exception as exc:
        raise _unreadable(name, exc) from exc


def _unreadable(name: str, exc: Exception) -> RequestError:
    """Decoders raise whatever a damaged file makes them stumble over, so any exception means the same."""
    return RequestError(f"{name} cannot be read ({exc}): give a whole file, one of {', '.join(FORMATS)}")


def _local_path(path: str, name: str) -> Path:
    scheme, is_url, rest = path.partition("://")
    if not is_url:
        return Path(path)
    host, _, file = rest.partition("/")
    if scheme != "file" or host not in ("", "localhost"):
        raise RequestError(f"{name}: {scheme} URLs are not fetched; give a path, bytes or a data: URL")
    return Path("/" + unquote(file))


def _data_url(url: str, name: str) -> bytes:
    header, comma, body = url.partition(",")
    if not comma:
        raise RequestError(f"{name} has no comma: the form is data:image/png;base64,...")
    if not header.endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(unquote(body), validate=True)
    except ValueError as exc:
        raise RequestError(f"{name} is not valid base64 ({exc})") from exc
