"""Other APIs translated onto chat completions: OpenAI's Responses and Anthropic's Messages.

A translation is made of two pure halves. The request half turns the client's body into the body of the chat request
that means the same; from there on the request is a chat request like any other, so it is routed by the same block keys,
fails over alike and ends alike. The answer half turns what the replica says, whole or chunk by chunk, into the client's
shapes. Nothing here does I/O: `answer.TranslatedAnswer` stands where the proxy's `Answer` stands.
"""
