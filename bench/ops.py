"""Every kernel against its floor on a GPU: `python bench/ops.py --family experts linear`.

The study is deepinfer/studies/kernels; results go to bench/results/h200/<name>.json.
"""

import argparse
from pathlib import Path

from deepinfer.studies.kernels import harness

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", nargs="+", default=list(harness.FAMILIES))
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--name", default="ops", help="of the results file")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--profile", action="store_true", help="call each case once, untimed, for a profiler around it")
    args = parser.parse_args()
    if args.profile:
        harness.profile(tuple(args.family), args.match)
        raise SystemExit
    harness.run(args.name, tuple(args.family), args.match, args.results)
