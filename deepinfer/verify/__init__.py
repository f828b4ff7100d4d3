"""`deepinfer verify`: recompute every array of a goldens folder and judge it by one table.

Belongs here: walking the folder, the report. Does not belong here: the arrays (arrays.py, units.py), tolerances
(rules.toml). A goldens folder is a checkpoint with `golden.safetensors`, or a folder of such folders plus
`units.safetensors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.errors import CheckpointError
from deepinfer.model.checkpoint import INDEX
from deepinfer.text.tokenizer import Tokenizer, engram_token_map
from deepinfer.verify import rules
from deepinfer.verify.arrays import Bench, arrays
from deepinfer.verify.rules import Check
from deepinfer.verify.units import units

GOLDEN, UNITS = "golden.safetensors", "units.safetensors"


def verify(path: str | Path, *, device: str = "cpu") -> Iterator[tuple[str, Check]]:
    """(checkpoint name, check) for every array under `path`, in order of computation; skipped arrays are listed last.

    Raises CheckpointError when there is nothing to verify.
    """
    root = Path(path)
    folders = [root] if (root / GOLDEN).is_file() else sorted(p.parent for p in root.glob(f"*/{GOLDEN}"))
    unit_file = root / UNITS
    if not folders and not unit_file.is_file():
        raise CheckpointError(
            f"{root} holds neither {GOLDEN}, folders with one, nor {UNITS}: pass a goldens folder "
            "(a checkpoint alone has no expected values; `deepinfer generate --model DIR` runs it)"
        )
    if unit_file.is_file():
        for check in _verify_units(unit_file, device):
            yield "units", check
    for folder in folders:
        if len(folders) > 1 and not (folder / INDEX).is_file():
            yield folder.name, rules.skipped(GOLDEN, "no weights in this folder, so nothing to recompute it from")
            continue
        for check in verify_checkpoint(folder, device=device):
            yield folder.name, check


def verify_checkpoint(folder: Path, *, device: str = "cpu") -> Iterator[Check]:
    """Checks of one goldens checkpoint."""
    golden = load_file(folder / GOLDEN)
    bench = Bench.load(folder, golden, _token_map(folder, device), device)
    noise = golden.get("p1.noise_rel")
    yield from _judge(folder.name, golden, arrays(bench), noise, _clear_rows(golden))


def _verify_units(file: Path, device: str) -> Iterator[Check]:
    from deepinfer.model.synthetic import named_config

    golden = load_file(file)
    yield from _judge("units", golden, units(golden, named_config("full"), device), None, None)


def _judge(
    checkpoint: str,
    golden: Mapping[str, Tensor],
    values: Iterator[tuple[str, Tensor]],
    noise: Tensor | None,
    clear: Tensor | None,
) -> Iterator[Check]:
    done = set()
    for name, value in values:
        rule = rules.rule_for(checkpoint, name)
        if name not in golden or name in done or rule is None or rule.skip:
            continue  # computed on the way, not stored
        done.add(name)
        want = golden[name]
        got = value.cpu() if want.dtype.itemsize == 1 or want.dtype is torch.bool else value.cpu().to(want.dtype)
        if want.dtype.is_floating_point and want.dtype.itemsize > 1 and rule.metric != "equal":
            got = value.cpu().float()
        yield rules.judge(name, rule, got, want, noise if noise is not None else 1.0, clear)
    for name in sorted(set(golden) - done):
        rule = rules.rule_for(checkpoint, name)
        if rule is not None and rule.skip:
            yield rules.skipped(name, rule.skip)
        else:
            yield rules.failed(name, "no rule in rules.toml" if rule is None else "was not recomputed")


def _token_map(folder: Path, device: str) -> Tensor:
    from deepinfer.model.config import ModelConfig

    vocab = ModelConfig.from_dir(folder).vocab_size
    return torch.from_numpy(engram_token_map(Tokenizer(folder), vocab)).to(device)


def _clear_rows(golden: Mapping[str, Tensor]) -> Tensor | None:
    """p1 rows without a near-tie in any layer: every stored selection and routing gap exceeds 1e-4."""
    gaps = [g.float() for n, g in golden.items() if n.startswith(("p1.gap.", "p1.rgap."))]
    return torch.stack(gaps).amin(0) > 1e-4 if gaps else None
