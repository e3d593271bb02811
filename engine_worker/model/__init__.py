"""Loading, KV tensors, attention, the runner and the sampler: everything that touches torch.

The rest of the worker sees this package through one interface::

    runner = load_model(config, progress)      # engine_worker.model.load; progress(str) gets one-line messages
    runner.info                                # ModelInfo: vocab_size, eos_token_ids, max_model_len, num_blocks, ...
    result = runner.execute(plan)              # StepPlan -> StepResult
    runner.release(request_id)                 # forget a request's sampler state (idempotent)
"""
