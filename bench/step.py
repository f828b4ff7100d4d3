"""Times of whole steps on a GPU: `python bench/step.py --model slice-12 --rows 1 8 64 256 --context 4096 32768`.

The study is deepinfer/studies/step.py; results go to bench/results/h200/<name>.json.
"""

import argparse
from pathlib import Path

from deepinfer.studies import step

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="slice-12")
    parser.add_argument("--mode", default="layer", choices=["layer", "model", "graph"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, nargs="*", default=[4096, 32768])
    parser.add_argument("--prefill", type=int, nargs="*", default=[8192])
    parser.add_argument("--name", default="step")
    parser.add_argument("--trace", help="file for a Perfetto trace of the first prefill case")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    a = parser.parse_args()
    step.run(a.name, a.model, a.mode, tuple(a.rows), tuple(a.context), tuple(a.prefill), a.results, a.trace)
