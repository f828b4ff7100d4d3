"""Studies: measurements that anybody can repeat, one file per question; the scripts of bench/ run them.

Belongs here: what to measure against what, and the one writer of results (report.py). Does not belong here:
checks of numbers (deepinfer/verify), anything that the engine needs.
"""
