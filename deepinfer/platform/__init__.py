"""Devices as the engine sees them: memory, a thread that feeds them, host buffers they read from.

Belongs here: everything outside kernels that differs between cpu, cuda and npu. Does not belong here: what runs.
"""
