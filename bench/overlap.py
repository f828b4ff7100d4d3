"""How busy a device stays whose step takes 5 ms, with async scheduling and without: `python bench/overlap.py`.

The study is deepinfer/studies/engine.py; results go to bench/results/cpu/overlap.json.
"""

import argparse
from pathlib import Path

from deepinfer.studies import engine

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256, help="running requests")
    parser.add_argument("--step-ms", type=float, default=5.0, help="what the device takes for a step")
    args = parser.parse_args()
    engine.overlap_main(args.requests, args.step_ms / 1000, Path(__file__).parent / "results")
