"""One command that proves and times the worker on a CUDA device: `python -m loadtest.gpu_check` starts it.

No network, no weights: models are made from configurations, large ones with random weights. Sections are independent:
one that fails, or outlives its time, is reported and the next one goes on. `--device cpu --tiny` runs the same code on
a CPU in miniature, with Triton's interpreter (TRITON_INTERPRET=1), so that the check itself is known to work before it
meets a GPU.
"""
