"""The `deepinfer` command: what a person types, and how results and errors are shown.

Belongs here: options, reading and writing files named on the command line, printing. Does not belong here:
anything a Python caller would also need (llm.py, text/, doctor.py). Modules of this room import torch only
inside commands, so that `--help` and most errors take well under half a second.
"""
