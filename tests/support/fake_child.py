"""A child for `warmgate up` that behaves as its argument says: a tiny HTTP server, or a death.

usage: fake_child.py PORT STORY [STATE_FILE]
stories: serve | exit:STATUS:WORDS | kill-self | deaf (ignores SIGTERM) | failed:WORDS | dies-first:N (killed N times
before it serves, counted in STATE_FILE) | forks (serves, with a child of its own whose pid goes to STATE_FILE)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> None:
    port, story, *rest = sys.argv[1:]
    kind, _, argument = story.partition(":")
    status, detail = "ready", "all well"
    match kind:
        case "exit":
            code, _, words = argument.partition(":")
            print("some line before")
            print(words)
            sys.exit(int(code))
        case "kill-self":
            os.kill(os.getpid(), signal.SIGKILL)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "failed":
            status, detail = "failed", argument
        case "dies-first":
            state = Path(rest[0])
            deaths = int(state.read_text()) if state.exists() else 0
            if deaths < int(argument):
                state.write_text(str(deaths + 1))
                os.kill(os.getpid(), signal.SIGKILL)
        case "forks":
            Path(rest[0]).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    serve(int(port), status, detail)


def serve(port: int, status: str, detail: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state = {"status": status, "incarnation": "i", "version": "0", "model": "m", "detail": detail}
            health = {"status": "ok", "replicas": [{"state": "ready", "models": ["m"]}]}
            body = json.dumps(state if self.path.startswith("/internal") else health).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer.allow_reuse_address = True
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
