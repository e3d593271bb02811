"""Requests, block pool, KV manager and scheduler: what each step computes, as a machine without torch, clock or I/O."""
