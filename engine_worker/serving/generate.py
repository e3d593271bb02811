"""The way of one generation request: body, preparation, engine, answer.

The status line waits for the first token, so that whatever fails before it keeps a true status and can be tried
elsewhere. From then on (stream.py) a failure is an error event at the end of the stream. A client that goes away at any
moment cancels the request in the engine (the call closes as the exception passes).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from engine_worker.contract.errors import ApiError
from engine_worker.contract.resume import MARKS_HEADER
from engine_worker.contract.work import WORK_HEADER, read_work
from engine_worker.core.types import FinishReason, SampledToken
from engine_worker.serving import resume
from engine_worker.serving.detokenizer import Piece, PlacedToken, SequenceText
from engine_worker.serving.engine_client import Call, EngineClient, News
from engine_worker.serving.http import Exchange
from engine_worker.serving.messages import Update
from engine_worker.serving.metrics import RequestMetrics, WorkerMetrics
from engine_worker.serving.prepare import PreparedCall, Preparer
from engine_worker.serving.prompt_echo import echoed
from engine_worker.serving.replies import ChatReply, CompletionReply, Reply, Usage
from engine_worker.serving.resume import Marks, ended_already
from engine_worker.serving.stream import Stream
from engine_worker.serving.token_text import TokenText

_PROMPT_TAIL = 6  # ids of the prompt that a windowed decoder gets as context


class Generation:
    """One request's sequences on their way to text."""

    def __init__(
        self, prepared: PreparedCall, tokens: TokenText, metrics: RequestMetrics, marks: Marks | None = None
    ) -> None:
        self._prepared = prepared
        self._metrics = metrics
        self.marks = marks
        self._tokens = tokens
        self._scores: dict[int, list[SampledToken]] = {}  # prompt -> its tokens behind the first, with logprobs
        self._echoed: dict[int, int] = {}  # sequence -> characters of its prompt, which its answer began with
        self.texts = [self._text(prepared, tokens, p) for p in range(len(prepared.prompts)) for _ in range(prepared.n)]
        self._begun: set[int] = set()  # sequences
        self._cached: dict[int, int] = {}  # prompt -> tokens that its first choice found in the cache
        self._drafts: dict[int, tuple[int, int]] = {}  # sequence -> speculated tokens, and accepted ones
        self._num_unfinished = len(self.texts)

    @staticmethod
    def _text(prepared: PreparedCall, tokens: TokenText, prompt: int) -> SequenceText:
        tail = prepared.prompts[prompt][-_PROMPT_TAIL:]
        stream = tokens.stream(prepared.skip_special_tokens, tail, prepared.kept_special)
        return SequenceText(
            stream,
            prepared.stops,
            include_stop=prepared.include_stop,
            min_tokens=prepared.params[prompt].min_tokens,
            stop_token_ids=prepared.params[prompt].stop_token_ids,
            repeats=prepared.tools.repeats() if prepared.tools is not None else None,
        )

    def replay(self, reply: Reply) -> None:
        """Put the tokens that were sent elsewhere through everything, and say nothing. Raises ApiError."""
        for token_id in self._prepared.output_ids:
            piece = self._piece(0, Update("", SampledToken(token_id), None))
            if piece.finish_reason is not None:
                raise ended_already()
            reply.skip(0, piece)

    @property
    def is_finished(self) -> bool:
        return self._num_unfinished == 0

    def take(self, call: Call, news: News) -> list[tuple[int, Piece]]:
        """The pieces that the news make. Raises ApiError where a sequence has failed."""
        pieces = []
        for index, update in news:
            text = self.texts[index]
            if text.finish_reason is not None:
                continue  # a stop string ended it; the engine was a step ahead
            if update.finish_reason is FinishReason.ERROR:
                raise ApiError(update.error_status, update.error or "Generation failed.", code=update.error_code)
            if update.finish_reason is FinishReason.ABORT:
                raise ApiError(503, "The engine dropped this request.", retry_after_s=1)
            if index not in self._begun:
                self._begin(index, update)
            if update.num_draft_tokens:
                self._drafts[index] = (update.num_draft_tokens, update.num_accepted_tokens)
            if update.prompt_logprobs:
                self._scores.setdefault(index // self._prepared.n, []).extend(update.prompt_logprobs)
            if update.token is None and update.finish_reason is None:
                continue  # part of the prompt was scored
            self._metrics.token(index, update)
            piece = self._piece(index, update)
            if self.marks is not None:
                assert update.token is not None, "each piece is a token's"
                self.marks.note(update.token.token_id, self._drafts_of_all())
            if piece.finish_reason is not None:
                self._num_unfinished -= 1
                num_tokens = text.num_tokens - len(self._prepared.output_ids)
                self._metrics.finished(index, piece.finish_reason, num_tokens)
                call.finish(index)
            pieces.append((index, piece))
        return pieces

    def _begin(self, index: int, update: Update) -> None:
        """A sequence's first news: those of a prompt's first choice tell what was cached of it."""
        self._begun.add(index)
        prompt, choice = divmod(index, self._prepared.n)
        if choice == 0:
            self._cached[prompt] = update.num_cached_tokens

    def _piece(self, index: int, update: Update) -> Piece:
        """The next piece of a sequence, with the prompt in front of the first where it is echoed."""
        text = self.texts[index]
        if self._prepared.prompt_only:
            piece = text.drop()
        else:
            piece = text.push(update.token, update.finish_reason, is_complete=update.is_complete)
        if not self._prepared.echo:
            return piece
        prompt, tokens = "", piece.tokens
        lead: tuple[PlacedToken, ...] = ()
        if index not in self._echoed:
            at = index // self._prepared.n
            skip = self._prepared.skip_special_tokens
            prompt, lead = echoed(self._prepared.prompts[at], self._scores.get(at, []), self._tokens, skip)
            self._echoed[index] = len(prompt)
        moved = tuple(PlacedToken(placed.token, placed.offset + self._echoed[index]) for placed in tokens)
        return Piece(prompt + piece.text, lead + moved, piece.finish_reason, piece.stop_reason)

    @property
    def prompt_scores(self) -> list[list[SampledToken]]:
        """Of each prompt, its tokens behind the first with their logprobs, where they were asked for."""
        return [self._scores.get(prompt, []) for prompt in range(len(self._prepared.prompts))]

    def failed(self) -> None:
        self._metrics.failed()

    @property
    def usage(self) -> Usage:
        told = self._prepared.told_cached
        drafts, accepted = self._drafts_of_all()
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self._prepared.prompts),
            completion_tokens=sum(text.num_tokens for text in self.texts),
            cached_tokens=sum(self._cached.values()) if told is None else told,
            draft_tokens=drafts,
            accepted_tokens=accepted,
        )

    def _drafts_of_all(self) -> tuple[int, int]:
        """Tokens speculated so far and those of them that were right, those of a worker before this one included."""
        if not self._drafts:
            return self._prepared.told_drafts
        counts = (self._prepared.told_drafts, *self._drafts.values())
        return sum(drafts for drafts, _ in counts), sum(accepted for _, accepted in counts)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Known once the first choice has a token. With several prompts and a stream: of those that have begun."""
        headers = [(b"x-warmgate-cached-tokens", str(sum(self._cached.values())).encode())]
        return headers if self.marks is None else [*headers, (MARKS_HEADER, b"1")]


class Generator:
    """Serves the two completion routes for one loaded model."""

    def __init__(
        self, preparer: Preparer, tokens: TokenText, client: EngineClient, metrics: WorkerMetrics, executor: Executor
    ) -> None:
        self._preparer = preparer
        self._tokens = tokens
        self._client = client
        self._metrics = metrics
        self._executor = executor

    async def chat(self, exchange: Exchange) -> None:
        body = await exchange.body()
        prepare = partial(self._preparer.chat, body)
        await exchange.while_connected(
            self._serve(exchange, prepare, ChatReply, "chatcmpl-" + uuid.uuid4().hex, int(time.time()))
        )

    async def completion(self, exchange: Exchange) -> None:
        body = await exchange.body()
        prepare = partial(self._preparer.completion, body)
        await exchange.while_connected(
            self._serve(exchange, prepare, CompletionReply, "cmpl-" + uuid.uuid4().hex, int(time.time()))
        )

    async def resume(self, exchange: Exchange) -> None:
        """The rest of an answer that another worker began: the body is a ResumeOrder."""
        order = resume.read_order(await exchange.body())
        prepare = partial(resume.prepare, self._preparer, order)
        shape: type[ChatReply | CompletionReply] = ChatReply if order.path == resume.CHAT_PATH else CompletionReply
        await exchange.while_connected(self._serve(exchange, prepare, shape, order.id, order.created, resumes=True))

    async def _serve(
        self,
        exchange: Exchange,
        prepare: Callable[[], PreparedCall],
        shape: type[ChatReply | CompletionReply],
        answer_id: str,
        created: int,
        resumes: bool = False,
    ) -> None:
        arrival_s = time.monotonic()
        work_s = read_work(exchange.header(WORK_HEADER))
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._executor, prepare)
        reply = shape(
            answer_id,
            created,
            prepared.model,
            self._tokens,
            prepared.num_logprobs,
            prepared.include_usage,
            prepared.num_prompt_logprobs,
            prepared.tools,
        )
        marks = resume.marks_for(prepared, exchange.header(MARKS_HEADER))
        with (
            self._client.submit(prepared, work_s) as call,
            self._metrics.request(prepared, arrival_s) as request_metrics,
        ):
            generation = Generation(prepared, self._tokens, request_metrics, marks)
            if prepared.output_ids:  # while the engine computes them
                await loop.run_in_executor(self._executor, generation.replay, reply)
            if prepared.stream:
                await Stream(exchange, generation, call, reply, is_opened=resumes).run()
            else:
                await _answer(exchange, generation, call, reply)


async def _answer(exchange: Exchange, generation: Generation, call: Call, reply: Reply) -> None:
    """All of the answer in one body."""
    collected: list[list[Piece]] = [[] for _ in generation.texts]
    while not generation.is_finished:
        for index, piece in generation.take(call, await call.news()):
            collected[index].append(piece)
    body = reply.whole([_joined(pieces) for pieces in collected], generation.usage, generation.prompt_scores)
    await exchange.respond(200, body, generation.headers())


def _joined(pieces: list[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        pieces[-1].finish_reason,
        pieces[-1].stop_reason,
    )
