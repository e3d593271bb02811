"""What `warmgate up` shows: a live table on a terminal while models load, plain lines anywhere else.

A plain line is written whenever a child's progress changes, so a log file shows the same story as the terminal.
"""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


@dataclass(slots=True)
class _Row:
    status: str = "starting"
    detail: str = ""
    since: float = 0.0
    last_line: str = ""


class Screen:
    """Progress and output of the children, in the order they arrive."""

    def __init__(self, names: list[str], console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._rows = {name: _Row(since=time.monotonic()) for name in names}
        self._width = max(len(name) for name in names)
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._table, refresh_per_second=4, transient=True)
            self._live.start()

    def progress(self, name: str, status: str, detail: str) -> None:
        row = self._rows[name]
        changed = (row.status, row.detail) != (status, detail)
        news = status != row.status or detail != row.last_line  # children log their progress themselves, too
        if status != row.status:
            row.since = time.monotonic()
        row.status, row.detail = status, detail
        if changed and news and self._live is None:
            self.line(name, f"[{status}] {detail}".rstrip())

    def line(self, name: str, text: str) -> None:
        self._rows[name].last_line = text
        colour = _COLOURS[list(self._rows).index(name) % len(_COLOURS)]
        self.console.print(Text.assemble((f"{name:<{self._width}} | ", colour), text))

    def say(self, text: str) -> None:
        self.console.print(Text(text, style="bold" if self.console.is_terminal else ""))

    def verbatim(self, text: str) -> None:
        """As it is, for copying: no wrapping, no markup, no colour."""
        self.console.file.write(text + "\n")
        self.console.file.flush()

    def settle(self) -> None:
        """The live part is over; lines only from here on. May be called again."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, row in self._rows.items():
            style = {"ready": "green", "starting": "yellow"}.get(row.status, "red")
            seconds = f"{time.monotonic() - row.since:.0f} s" if row.status != "ready" else ""
            table.add_row(
                Text(name),
                Text(row.status, style=style),
                Text("" if row.detail == row.status else row.detail),
                Text(seconds, style="dim"),
            )
        return table


def ready_message(base_url: str, model: str, num_workers: int, policy: str, make_key: str = "") -> str:
    """How to call it, to be pasted as it stands: a shell line and Python for a script or a prompt.

    `make_key` is the command that makes an API key, where callers need one: the lines then take it from $KEY.
    """
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 48}
    )
    plural = "" if num_workers == 1 else "s"
    header = ' -H "Authorization: Bearer $KEY"' if make_key else ""
    own_key = "It wants an API key. One that you have does: export KEY=...; this makes another:\n\n"
    key = f"\n{own_key}export KEY=$({make_key})\n" if make_key else ""
    imports, api_key = ("import os\n", 'os.environ["KEY"]') if make_key else ("", '"unused"')
    return f"""
Warmgate is ready at {base_url}/v1 (model {model}, {num_workers} worker{plural}, policy {policy}).
{key}
In a shell:

curl -i {base_url}/v1/chat/completions{header} -H 'content-type: application/json' -d {shlex.quote(body)}

In Python (pip install openai):

{imports}from openai import OpenAI
client = OpenAI(base_url="{base_url}/v1", api_key={api_key})
answer = client.chat.completions.with_raw_response.create(
    model={json.dumps(model)},
    messages=[{{"role": "user", "content": "What is a KV cache?"}}],
    max_tokens=48,
)
print(answer.parse().choices[0].message.content)
print(answer.headers["x-warmgate-replica"], answer.headers["x-warmgate-cached-tokens"], "cached tokens")

Ctrl-C stops everything.
"""
