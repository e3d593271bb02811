"""Is a server a drop-in for OpenAI's API? A sceptical outsider's list of checks for any base URL.

    python -m loadtest.conformance http://127.0.0.1:8000

Each check is one sentence that clients rely on, and a function that asks the server and looks at the bytes. Nothing
here knows what is behind the URL: a check that a server could not pass for want of a feature says so as a failure like
any other, and one that can't be judged from outside (no `/tokenize` to learn token ids from) is skipped.
"""
