"""The compile gate: every GPU kernel for sm_90a and sm_100a, on a machine without a GPU. `make kernels`.

`python -m tools.compile_kernels [--jobs N]`: every variant of every Triton and Gluon kernel with the Triton of the GPU
machines (GPU_TRITON, put into build/ by pip when the environment has another one; without a network this part is left
out with a notice), one variant of each with the installed one, then csrc/cuda with nvcc where there is one. With
GPU_TRITON every variant must compile, hold the tensor core instruction that it promises (wgmma, tcgen05) and spill
nothing, and no wgmma may lose its A registers (tools/wgmma_hazards.py); another version's register allocation is not
tuned for, so there spills are allowed. Exits 1 when something fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from deepinfer.ops.triton import GLUON_TRITON, installed_triton

ROOT = Path(__file__).resolve().parents[1]
GPU_TRITON = "3.6.0"  # what torch 2.11 pins, and the H200 machine has


def no_hazards(folder: Path | None) -> bool:
    """tools.wgmma_hazards with the Triton in `folder` (None: the installed one)."""
    paths = os.pathsep.join(str(p) for p in (folder, ROOT) if p)
    command = [sys.executable, "-m", "tools.wgmma_hazards", "--quiet"]
    return not subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, cwd=ROOT, check=False).returncode


def gpu_triton() -> Path | None:
    """A folder for PYTHONPATH with GPU_TRITON; None when it cannot be downloaded."""
    target = ROOT / "build" / f"triton-{GPU_TRITON}"
    if not (target / "done").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(target)]
        done = subprocess.run([*pip, f"triton=={GPU_TRITON}"], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"kernels: triton {GPU_TRITON} cannot be installed, kernels are not compiled with it:", end=" ")
            print((done.stderr.strip().splitlines() or ["pip failed"])[-1])
            return None
        (target / "done").touch()
    return target


def triton_kernels(jobs: int, folder: Path | None, *more: str) -> bool:
    paths = [str(p) for p in (folder, ROOT) if p is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "deepinfer.ops.triton.compile", "--quiet", "--jobs", str(jobs), *more]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode == 0


def cuda_kernels() -> bool:
    """csrc/cuda for both architectures; registers and spills as ptxas reports them."""
    from deepinfer.ops.native import build_cuda

    nvcc = build_cuda.find_nvcc()
    if nvcc is None:
        print("kernels: no nvcc, csrc/cuda is not compiled")
        return True
    begin, good, kernels = time.perf_counter(), True, 0
    for source in sorted(build_cuda.SOURCES.glob("*.cu")):
        for arch in build_cuda.ARCHS:
            command = [nvcc, "-std=c++17", "-O3", "-cubin", f"-arch=sm_{arch}", "-Xptxas", "-v", '-DDI_STAMP="gate"']
            done = subprocess.run(
                [*command, str(source), "-o", os.devnull], capture_output=True, text=True, check=False
            )
            spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)]
            kernels += len(re.findall(r"Compiling entry function", done.stderr))
            lacks = (
                arch == "90a"
                and any(word in source.read_text() for word in ('"sm90.cuh"', "wgmma"))
                and not has_wgmma(nvcc, source)
            )
            if done.returncode or sum(spills) or lacks:
                good = False
                print(f"FAIL {source.name} sm_{arch}{' (no wgmma)' if lacks else ''}:\n{done.stderr[-3000:]}")
    print(f"csrc/cuda: {kernels} kernels {'good' if good else 'NOT good'} for ", end="")
    print(f"{' and '.join(f'sm_{a}' for a in build_cuda.ARCHS)}, {time.perf_counter() - begin:.0f} s")
    return good


def has_wgmma(nvcc: str, source: Path) -> bool:
    command = [nvcc, "-std=c++17", "-O3", "-ptx", "-arch=compute_90a", '-DDI_STAMP="gate"', str(source), "-o", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "wgmma.mma_async" in done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    installed, good = installed_triton(), True
    if not installed:
        print("kernels: no triton for this platform, Triton kernels are not compiled")
    else:
        folder = None if installed == GPU_TRITON else gpu_triton()
        if installed == GPU_TRITON or folder:
            good &= triton_kernels(args.jobs, folder)
            good &= no_hazards(folder)
        if installed != GPU_TRITON and installed.startswith(GLUON_TRITON):
            good &= triton_kernels(args.jobs, None, "--first", "--spills-allowed")
        elif installed != GPU_TRITON:
            print(f"kernels: not compiled with the installed triton {installed}, on which Gluon kernels do not run")
    good &= cuda_kernels()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
