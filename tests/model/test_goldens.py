"""Every golden array, recomputed and judged by the table that `deepinfer verify` uses (deepinfer/verify/rules.toml).

tests/data holds `tiny` and `units`; the full set (with `lite`: real head dims, window 128, top-512) runs when
DEEPINFER_GOLDENS or ../shared/goldens is there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.errors import CheckpointError
from deepinfer.verify import rules, verify, verify_checkpoint

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data"
FULL = Path(os.environ.get("DEEPINFER_GOLDENS") or ROOT.parent / "shared/goldens")

# checkpoint -> least number of arrays that must really be compared, most that may be skipped (inputs, annotations,
# defective)
EXPECTED = {"tiny": (110, 45), "units": (18, 15), "lite": (60, 30)}


def report(checks: list[rules.Check]) -> str:
    return "\n".join(f"{c.name}: {c.metric} {c.value:.3g} (limit {c.limit:.3g}) {c.note}" for c in checks)


def check_all(name: str, checks: list[rules.Check]) -> None:
    failed = [c for c in checks if c.verdict == "fail"]
    assert not failed, report(failed)
    compared = [c for c in checks if c.verdict == "pass"]
    assert len(compared) >= EXPECTED[name][0], f"only {len(compared)} arrays compared"
    skipped = [c for c in checks if c.verdict == "skip"]
    assert all(c.note for c in skipped), "a skipped array needs its reason"
    assert len(skipped) <= EXPECTED[name][1], report(skipped)


def test_tiny() -> None:
    check_all("tiny", list(verify_checkpoint(DATA / "tiny")))


def test_units_and_folder_walk(tmp_path: Path) -> None:
    (tmp_path / "units.safetensors").symlink_to(DATA / "units.safetensors")
    found = list(verify(tmp_path))
    assert {name for name, _ in found} == {"units"}
    check_all("units", [c for _, c in found])


@pytest.mark.slow
@pytest.mark.skipif(not (FULL / "lite/golden.safetensors").is_file(), reason=f"full goldens are not at {FULL}")
@pytest.mark.parametrize("name", ["tiny", "lite"])
def test_full_set(name: str) -> None:
    check_all(name, list(verify_checkpoint(FULL / name)))


def test_a_wrong_number_fails(tmp_path: Path) -> None:
    """The comparison can fail: one changed array, one unknown array, one that is never recomputed."""
    for file in (DATA / "tiny").iterdir():
        (tmp_path / file.name).symlink_to(file)
    arrays = load_file(DATA / "tiny/golden.safetensors")
    few = {n: arrays[n] for n in arrays if n.startswith(("p2.", "engram_", "token_map"))}
    few["p2.logits_official_fp32"] = few["p2.logits_official_fp32"] * 1.001
    few["p2.route.0_exact"] = torch.full((7, 2), 9, dtype=torch.int16)
    few["p9.logits_quant"] = torch.zeros(1)
    few["nobody_knows"] = torch.zeros(1)
    (tmp_path / "golden.safetensors").unlink()
    save_file(few, tmp_path / "golden.safetensors")
    failed = {c.name for c in verify_checkpoint(tmp_path) if c.verdict == "fail"}
    assert failed == {"p2.logits_official_fp32", "p2.route.0_exact", "p9.logits_quant", "nobody_knows"}


def test_a_folder_without_weights_is_skipped_by_name() -> None:
    """tests/data/lite holds a few arrays and no weights: the walk says so and goes on."""
    found = list(verify(DATA))
    assert [c.verdict for name, c in found if name == "lite"] == ["skip"]
    assert sum(c.verdict == "pass" for name, c in found if name == "tiny") >= EXPECTED["tiny"][0]
    assert not [c for _, c in found if c.verdict == "fail"]


def test_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"golden\.safetensors"):
        list(verify(tmp_path))
