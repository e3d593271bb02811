"""Optional C++ kernels for CPUs: found or built by build.py, called through kernels.py, each with a twin in torch.

Nothing needs them. Where no library can be had, the worker says so at load and computes with torch.
"""
