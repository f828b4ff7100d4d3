"""Copy the part of the goldens that the tests need into tests/data (at most 10 MB). Usage: python tests/data/make.py
GOLDENS_DIR
"""

from __future__ import annotations

import shutil
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
# Left out of tiny/golden.safetensors: defective arrays, and second copies of what another stored array checks as well.
DROP = (
    "*.decode.*_official",
    "*.draft.*_official",
    "p1.draft.logits_official_fixed",
    "*via_prefill*",
    "*_quant",
    "p1.t.X*",
    "p1.t.mid.*",
    "p1.res.[0125]_*",
    "p3.rw.*",
    "p3.route.*",
)
KEEP = ("p1.sel.*",)


def main(goldens: Path) -> None:
    for name in ("chat.json", "engram_text.json", "units.safetensors"):
        shutil.copyfile(goldens / name, HERE / name)
    for name in ("config.json", "tokenizer.json", "golden.safetensors"):
        (HERE / "lite").mkdir(exist_ok=True)
        if name != "golden.safetensors":
            shutil.copyfile(goldens / "lite" / name, HERE / "lite" / name)
    tiny = HERE / "tiny"
    tiny.mkdir(exist_ok=True)
    for file in (goldens / "tiny").iterdir():
        if file.name not in ("golden.safetensors", "agreement.json"):
            shutil.copyfile(file, tiny / file.name)
    arrays = load_file(goldens / "tiny" / "golden.safetensors")
    wanted = {
        n: t
        for n, t in arrays.items()
        if any(fnmatchcase(n, k) for k in KEEP) or not any(fnmatchcase(n, d) for d in DROP)
    }
    save_file(wanted, tiny / "golden.safetensors")
    lite = load_file(goldens / "lite" / "golden.safetensors")
    few = {n: lite[n] for n in ("token_map", "engram_multipliers", "engram_primes")}
    save_file(few, HERE / "lite" / "golden.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
