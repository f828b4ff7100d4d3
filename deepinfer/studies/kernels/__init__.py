"""Speed of every op against its floor, one file of cases per family of kernels, one harness."""
