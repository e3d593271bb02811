"""The worker's two processes, and everything between a socket and the scheduler.

API process (no torch)::

    cli -> server -> app -> generate            routes, and a request's way: body, preparation, engine, answer
                             prepare            bytes -> prompts and parameters (json_input, requests, validation)
                             engine_client      calls in flight, and the news that arrive for them
                             detokenizer        tokens -> text (token_text, stop_strings)
                             replies, sse       text -> JSON and events
    worker                                      status and the loaded model's tools; metrics beside it
    engine_supervisor                           starts the engine process, again and again if need be

Engine process::

    engine_process -> engine_loop               plan, execute, commit, tell; kv_publisher tells the gateway

`messages` is all that passes between the two. Either may die: the engine does not outlive its parent, and the API
process fails what was in flight, answers 503 and starts the engine again.
"""
